"""The log of rollouts as the trainer uses it: what it writes down, and what a run that was started again replays.

    trainer.default_local_dir/rollout_log/after_step_K/0001-trainer.log                 admissions, batches
                                                       0001-agent_loop_worker_0.log     trajectories
                                                       0002-trainer.log                 of the next start, ...

A folder has what came after the checkpoint of step K; 0 stands for the beginning of the run. A checkpoint begins a
folder, and when it is whole the folders before go: it has all that they have.

A start: read the folder -> plan -> open a file of its own -> unfinished responses join the checkpoint's tokens -> admit
under the old names -> take the old batches, while workers replay what they claim -> after the last old batch everything
is as usual. A checkpoint copies into its folder what nobody has claimed by then. docs/design/0014 says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import deque
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from partial_rollout.agent_loop.log_reading import read_frames, read_records, read_tokens
from partial_rollout.agent_loop.rollout_log import LogFolder
from partial_rollout.core.replay import History, Place, Plan
from partial_rollout.core.rollout_log import (
    HEADER,
    TRAINER,
    Abandoned,
    Admitted,
    Group,
    Opened,
    Taken,
    checksum,
    encode,
    frame,
    prompt_of,
)
from partial_rollout.errors import WaitTimeout
from partial_rollout.runtime.bounded import call_bounded
from partial_rollout.runtime.log_writer import LogWriter
from partial_rollout.settings.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from omegaconf import DictConfig

    from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager
    from partial_rollout.agent_loop.trajectory import Saved
    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.types import FinishedGroup, QueueSnapshot

logger = logging.getLogger(__name__)

FOLDER = "rollout_log"
WORLD = (
    "data.train_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.shuffle",
    "data.seed",
    "data.apply_chat_template_kwargs",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.multi_turn",
    "algorithm",
    *(f"actor_rollout_ref.actor.{key}" for key in (
        "optim.lr", "optim.weight_decay", "optim.betas", "optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio",
        "optim.lr_scheduler_type", "optim.warmup_style", "optim.min_lr_ratio", "policy_loss", "loss_agg_mode",
        "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coeff", "use_kl_loss",
        "kl_loss_coef", "kl_loss_type", "ppo_mini_batch_size", "ppo_epochs", "grad_clip",
    )),
    "critic.optim.lr",
    "reward",
    "trainer.resume_mode",
    "trainer.resume_from_path",
)  # fmt: skip
"""Settings that responses, their scores, their order or the weights that sampled them depend on: with another value the
log is of another run."""
REWARD_FILE = "reward.custom_reward_function.path"
READ_TIMEOUT_S = 600.0
"""Gigabytes take seconds; this bounds a disk that stands still."""
BYTES_A_TOKEN = 17
"""Token, log-prob and mask; and once more token and log-prob, of a response that was interrupted."""
CARRIED = "carried"
"""Role in the name of the file with what a checkpoint has copied from the folder before."""
COPY_TIMEOUT_S = 60.0
"""Few responses are left by the first checkpoint; this bounds a disk that stands still."""
NUM_STEPS_OF_ROOM = 20
"""Steps that should find room on the disk: with the default of 20 minutes between checkpoints, steps of a minute."""


def logs_rollouts(config: DictConfig, block: PartialRolloutConfig) -> bool:
    """Whether the run has a log: where it goes on from checkpoints, and its responses fit in.

    Rounds of `reorder` are planned by what is done at their beginning, which a replay changes. A teacher's log-probs
    and routed experts are larger than all that a record has.
    """
    saves = config.trainer.save_freq > 0 or block.minutes_between_saves is not None
    too_large = config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay")
    too_large = too_large or OmegaConf.select(config, "distillation.enabled")
    return bool(block.rollout_log and saves and block.tail.policy != "reorder" and not too_large)


class RunLog:
    """Writes the trainer's file of the log, tells workers where theirs are, and says what a step is to replay.

    begin -> name_prompts, wanted, taken ... -> before_save -> carry -> after_save -> forget_claimed ... -> end
    """

    def __init__(self, config: DictConfig, workers: PartialRolloutAgentLoopManager) -> None:
        """`workers` write below a folder, replay what has ended, and forget what they were to go on from."""
        self._config = config
        self._root = Path(config.trainer.default_local_dir).absolute() / FOLDER
        self._workers = workers
        self._writer = LogWriter(TRAINER)
        self._world = world(config)
        self._number = 1
        self._plan = Plan()
        self._waiting: deque[tuple[int, tuple[str, ...]]] = deque()
        """Steps and uids of the batches that are still to be replayed."""
        self._coming: dict[str, int] = {}
        """Numbers of the prompts that the plan names."""
        self._num_admitted = 0
        self.has_replayed = False
        """Whether the last batch was one of the log."""
        self._replayed_folder = ""
        """Folder from which workers replay, until a checkpoint finds nothing left of it."""
        self._num_left: int | None = None
        """Trajectories of this folder that were still to be replayed at the last checkpoint; None: there was none."""
        self._goes_on: frozenset[str] = frozenset()
        """Trajectories that go on from tokens of the log, while it is replayed."""
        self._before: Saved = {}
        """Tokens that the checkpoint has of these."""
        self._last_step = 0
        """The step whose batch was taken last, or that of the checkpoint."""

    def begin(self, base_step: int, snapshot: QueueSnapshot | None, saved: Saved) -> Saved:
        """Training goes on after the checkpoint of `base_step`, which has this queue; None: there is no checkpoint.

        Call it when workers run, and before they claim. Returns the tokens of responses that had not ended, which are
        newer than those of the checkpoint, `saved`.
        """
        folder = self._root / f"after_step_{base_step}"
        self._last_step = base_step
        self._num_admitted = 0 if snapshot is None else snapshot.admitted
        try:
            free, history, self._number, why_not = call_bounded(
                lambda: self._read(folder, base_step),
                timeout_s=READ_TIMEOUT_S,
                who_waits=f"trainer waits for the log of rollouts in {folder}",
            )
        # Without its log a new start generates again; a run that ended for its log would cost more.
        except (OSError, WaitTimeout) as error:
            logger.warning("there is no log of rollouts, the run goes on without it: %s", error)
            return {}
        unfinished = [] if snapshot is None else [prompt.uid for prompt in snapshot.unfinished]
        done = [] if snapshot is None else [group.uid for group in snapshot.done]
        plan = history.plan(base_step, first=self._num_admitted, unfinished=unfinished, done=done)
        if why_not:
            logger.warning("responses that were logged after step %d are generated again: %s", base_step, why_not)
        self._use(plan)
        # Before the replay: its trajectories are written again, into this start's own files.
        self._open(LogFolder(str(folder), self._number, base_step), plan.through)
        self._warn_of_room(free)
        if not plan.places and not plan.unfinished:
            return {}
        self._replayed_folder = folder.name
        self._workers.replay(plan.places)
        logger.warning("%s", describe(plan, base_step))
        tokens = self._tokens(plan)
        self._goes_on = frozenset(tokens)
        self._before = {key: saved[key] for key in tokens if key in saved}
        return tokens

    def _tokens(self, plan: Plan) -> Saved:
        try:
            return call_bounded(
                lambda: read_tokens(plan.unfinished),
                timeout_s=READ_TIMEOUT_S,
                who_waits=f"trainer waits for tokens of unfinished responses in {self._root}",
            )
        except WaitTimeout as error:
            logger.warning("unfinished responses go on from the checkpoint's tokens only: %s", error)
            return {}

    def _read(self, folder: Path, base_step: int) -> tuple[int, History, int, str]:
        """Free bytes on the disk, then as `read_history`."""
        if self._config.trainer.resume_mode == "disable":
            # The run begins afresh: what is here would be replayed after a checkpoint of the same step.
            shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self._root).free, *read_history(folder, base_step, self._world)

    def name_prompts(self, uids: Sequence[str], prompts: Sequence[str]) -> list[str]:
        """The uids under which prompts are admitted: their old ones, where an earlier start has admitted the same.

        `prompts` says what each of them asks.
        """
        names: list[str] = []
        for number, (uid, prompt) in enumerate(zip(uids, prompts, strict=True), self._num_admitted):
            old, asked = self._plan.names.get(number, ("", ""))
            # A number is not enough: another data file or order would give an old name to another prompt.
            if old and asked != prompt:
                self._break_off(f"prompt {number + 1} of the run is another one than before")
                old = ""
            names.append(old or uid)
        # Replayed ones too: the next start takes the name of a prompt from the latest file that has its number.
        self._writer.append(encode(Admitted(first=self._num_admitted, uids=names, prompts=list(prompts))))
        self._num_admitted += len(names)
        return names

    def wanted(self, step: int) -> tuple[str, ...]:
        """The prompts of the batch that the step is to take, in their order; empty: any."""
        return self._waiting[0][1] if self._waiting and self._waiting[0][0] == step else ()

    def require_coming(self, step: int) -> None:
        """Prompts of the wanted batch are missing: end the replay unless they are still to be admitted."""
        # A prompt that is still to be admitted is on its way; any other one has been dropped, and never comes.
        if not any(self._coming.get(uid, -1) >= self._num_admitted for uid in self.wanted(step)):
            self._break_off(f"a prompt of the batch of step {step} has left the queue", through=step - 1)

    def taken(self, step: int, groups: Sequence[FinishedGroup]) -> int:
        """A batch was taken; returns how many of its trajectories were not generated for it in this start."""
        members = [Group(each.uid, [(t.key, t.log_checksum) for t in each.trajectories]) for each in groups]
        self._writer.append(encode(Taken(step=step, groups=members)))
        self._last_step = step
        # Read before the batch leaves `_waiting`.
        self.has_replayed = bool(self.wanted(step))
        if not self.has_replayed:
            return 0
        self._waiting.popleft()
        places = self._plan.places
        told = [(t.key.rpartition("_")[0], t.log_checksum) for group in groups for t in group.trajectories]
        # By checksum: a worker that was lost takes what it had claimed with it, and that is generated again.
        return sum(key in places and places[key].checksum == check for key, check in told)

    @property
    def is_replaying(self) -> bool:
        """Whether batches of the log are still to be taken: a checkpoint now would separate them from the others."""
        return bool(self._waiting)

    def before_save(self, step: int) -> None:
        """A checkpoint of `step` begins: what follows is written into a folder of its own."""
        folder = remove_log_after(self._config, step)
        if not self._writer.is_on:
            return
        self._number = 1
        self._open(LogFolder(str(folder), 1, step), step)

    def carry(self, step: int, snapshot: QueueSnapshot) -> None:
        """Copy what is still to be replayed into the folder of the checkpoint of `step`, whose queue this is.

        Finished responses whose groups are not whole yet, and unfinished ones of prompts that are still to be admitted:
        the checkpoint's tokens have those of the other prompts.
        """
        if not self._replayed_folder:
            return
        coming = {uid for uid, number in self._coming.items() if number >= self._num_admitted}
        # No further attempt goes on from what the first one had.
        again = snapshot.failures.keys() | snapshot.restarts.keys()
        waiting = coming | {prompt.uid for prompt in snapshot.unfinished} - again
        left = {key: (place,) for key, place in self._plan.places.items() if prompt_of(key) in waiting}
        left |= {key: places for key, places in self._plan.unfinished.items() if prompt_of(key) in coming}
        self._num_left = len(left)
        if not left or not self._writer.is_on:
            return
        names = [self._plan.names[number] for number in sorted(self._plan.names) if number >= self._num_admitted]
        uids, prompts = [uid for uid, _ in names], [asked for _, asked in names]
        self._writer.append(encode(Admitted(first=self._num_admitted, uids=uids, prompts=prompts)))
        # Number 0: whatever this start writes of the same trajectories comes later.
        folder = LogFolder(str(self._root / f"after_step_{step}"), 0, step)
        opened = folder.opened(TRAINER, world=self._world, holds_through=step)

        def copy() -> int:
            write_frames(folder.file(TRAINER), [opened])
            found = [read_payloads(places) for places in left.values()]
            write_frames(folder.file(CARRIED), [folder.opened(CARRIED), *chain.from_iterable(found)])
            return found.count([])

        lost, why = len(left), "some of their records are not what was written"
        try:
            who = f"trainer waits for a copy of {len(left)} logged responses in {folder.path}"
            lost = call_bounded(copy, timeout_s=COPY_TIMEOUT_S, who_waits=who)
        except (OSError, WaitTimeout) as error:
            why = str(error)
        if lost:
            said = "%d logged responses are generated again if the run dies before they are in a batch: %s"
            logger.warning(said, lost, why)

    def after_save(self, step: int) -> None:
        """The checkpoint is whole: it has what the folders before have, but for what workers may yet replay."""
        self._writer.remove(self._root, but={f"after_step_{step}", self._replayed_folder})

    def forget_claimed(self) -> None:
        """Let workers forget what they have replayed, once a checkpoint has found nothing left of it.

        Without it all of them would keep its places until the run ends.
        """
        if self._num_left != 0 or not self._replayed_folder or self.is_replaying:
            return
        # The next checkpoint removes it: a worker may read its last record now.
        self._replayed_folder, self._goes_on, self._before = "", frozenset(), {}
        coming = {number: names for number, names in self._plan.names.items() if number >= self._num_admitted}
        self._use(Plan(names=coming, through=self._plan.through))
        self._workers.replay({})

    def end(self, *, is_complete: bool, timeout_s: float) -> None:
        """The run ends; after its last step there is nothing to go on from, and the log goes."""
        if is_complete:
            self._writer.remove(self._root)
        self._writer.close(timeout_s)

    def _use(self, plan: Plan) -> None:
        self._plan = plan
        self._waiting = deque((batch.step, batch.uids) for batch in plan.batches)
        self._coming = {uid: number for number, (uid, _) in plan.names.items()}

    def _break_off(self, why: str, *, through: int | None = None) -> None:
        """Go on without the log: what it says of later steps holds no more."""
        if through is None:
            through = self._waiting[0][0] - 1 if self._waiting else self._last_step
        logger.warning("the replay of logged responses ends before step %d: %s", through + 1, why)
        self._use(Plan(through=through))
        self._writer.append(encode(Abandoned(holds_through=through, admitted=self._num_admitted)))
        # Workers forget it too, or they would answer for prompts of another history.
        self._workers.replay({})
        if self._goes_on:
            self._workers.go_back(self._goes_on, self._before)
        self._goes_on, self._before = frozenset(), {}

    def _open(self, folder: LogFolder, holds_through: int) -> None:
        self._writer.open(folder.file(TRAINER))
        self._writer.append(folder.opened(TRAINER, world=self._world, holds_through=holds_through))
        self._workers.begin_log(folder)

    def _warn_of_room(self, free: int) -> None:
        needed = NUM_STEPS_OF_ROOM * step_bytes(self._config)
        if free < needed:
            logger.warning(
                "the log of rollouts may not find room on the disk: %d steps have up to %.1f GiB, %.1f GiB are free "
                "below trainer.default_local_dir. If the disk is full the log ends, and the run goes on without it",
                NUM_STEPS_OF_ROOM,
                needed / GIB,
                free / GIB,
            )


def remove_log_after(config: DictConfig, step: int) -> Path:
    """Remove what a run that was left for this one has logged after its checkpoint of `step`; returns the folder."""
    folder = Path(config.trainer.default_local_dir).absolute() / FOLDER / f"after_step_{step}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def world(config: DictConfig) -> dict[str, str]:
    """The settings that responses depend on, and the reward function's text."""
    found: dict[str, str] = {}
    for key in WORLD:
        value = OmegaConf.select(config, key)
        plain: Any = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        found |= {name: json.dumps(leaf, default=str) for name, leaf in leaves(key, plain)}
    path = OmegaConf.select(config, REWARD_FILE)
    if isinstance(path, str) and Path(path).is_file():
        found["the reward function's file"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a block, each by its whole name.

    >>> dict(leaves("a", {"b": 1, "c": {"d": [2, 3], "e": {}}}))
    {'a.b': 1, 'a.c.d': [2, 3]}
    """
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(f"{key}.{name}", each)
    else:
        yield key, value


def prompt_digest(asked: object) -> str:
    """What a prompt asks, in a form that is the same after a restart.

    >>> prompt_digest((3, [{"role": "user", "content": "1 + 1?"}]))
    '3:f5c122818700'
    """
    index, messages = cast("tuple[Any, Any]", asked)
    said = json.dumps(messages, sort_keys=True, default=str)
    return f"{index}:{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def step_bytes(config: DictConfig) -> int:
    """Bytes of the records of a step whose responses are all as long as they may be."""
    data, n = config.data, config.actor_rollout_ref.rollout.n
    return data.train_batch_size * n * (data.max_prompt_length + data.max_response_length) * BYTES_A_TOKEN


def read_payloads(places: Sequence[Place]) -> list[bytes]:
    """The records of one trajectory, without their frames; none if one of them is not what was written."""
    try:
        payloads = [content[HEADER.size :] for content in read_frames(places)]
    except OSError:
        return []
    # A frame gets a new checksum where it is written again: what was damaged would be whole there.
    is_sound = all(checksum(payload) == place.checksum for payload, place in zip(payloads, places, strict=True))
    return payloads if is_sound else []


def write_frames(path: Path, payloads: Iterable[bytes]) -> None:
    """Write a new file of records, and put it on the disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for payload in payloads:
            file.write(frame(payload))
        file.flush()
        os.fsync(file.fileno())


def describe(plan: Plan, base_step: int) -> str:
    """What is replayed, in a line."""
    saved = f"{plan.num_responses:,} responses, {plan.num_tokens:,} tokens not generated again"
    if plan.unfinished:
        saved += f"; {len(plan.unfinished):,} unfinished responses go on from {plan.num_unfinished_tokens:,} tokens"
    if plan.through == base_step:
        return f"responses that were logged after step {base_step} are used for step {base_step + 1} on ({saved})"
    steps = (
        f"steps {base_step + 1} to {plan.through} are" if plan.through > base_step + 1 else f"step {plan.through} is"
    )
    return f"{steps} trained from logged responses ({saved})"


def read_history(folder: Path, base_step: int, now: Mapping[str, str]) -> tuple[History, int, str]:
    """What the files of a folder tell, the number of the next start, and why it is not used; empty: it is.

    Files that cannot be read cost what they have, and a warning.
    """
    starts: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("*.log")) if folder.is_dir() else ():
        number = path.name.partition("-")[0]
        if number.isdigit():
            starts.setdefault(int(number), []).append(path)
    history, why_not = History(), ""
    for number in sorted(starts):
        of_trainer = [path for path in starts[number] if path.name.endswith(f"-{TRAINER}.log")]
        records = [record for path in of_trainer for _, record in read_records(path)]
        opened = records[0] if records else None
        if not isinstance(opened, Opened) or opened.base_step != base_step:
            continue  # it ended before it had begun
        if why := _why_not(opened, now):  # training has gone on without what files before have
            history, why_not = History(), why
            continue
        # The trainer's file first: it says which records of earlier starts are void.
        for record in records:
            history.tell(record)
        why_not = ""
        for path in set(starts[number]) - set(of_trainer):
            for place, record in read_records(path):
                history.tell_of_worker(record, number, place)
    return history, max(starts, default=0) + 1, why_not


def _why_not(opened: Opened, now: Mapping[str, str]) -> str:
    changed = sorted(key for key in opened.world.keys() | now.keys() if opened.world.get(key) != now.get(key))
    if changed:
        key = changed[0]
        was, is_now = opened.world.get(key, "unknown"), now.get(key, "unknown")
        return f"they were generated with {key}={was[:200]}, and now it is {is_now[:200]}"
    return ""
