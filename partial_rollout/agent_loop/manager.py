"""Starts and watches the agent-loop workers; admits training prompts and runs validation."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import uuid4

import ray
import transfer_queue as tq
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from partial_rollout.agent_loop.log_reading import Left, read_left
from partial_rollout.agent_loop.store import PARTITION
from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker
from partial_rollout.core.rollout_log import prompt_of
from partial_rollout.core.slots import share_slots
from partial_rollout.errors import ActorLost, WaitTimeout
from partial_rollout.runtime.bounded import UNUSUAL, Wait, call_bounded
from partial_rollout.runtime.prompt_manager import find_manager
from partial_rollout.runtime.remote_call import is_missing, settle_all, wait_for, wait_for_all
from partial_rollout.runtime.run_watch import manager_limit_s
from partial_rollout.settings.derived import read_settings
from partial_rollout.types import PromptMeta

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ray.actor import ActorHandle
    from tensordict import TensorDict

    from partial_rollout.agent_loop.rollout_log import LogFolder
    from partial_rollout.agent_loop.trajectory import Saved
    from partial_rollout.core.replay import Place
    from partial_rollout.train.engine_recovery import EngineRecovery
    from partial_rollout.types import Claim, ReleaseResult

logger = logging.getLogger(__name__)

HOLD_TIMEOUT_S = 60.0
"""A worker answers at once: it only notes which claims are held back. One that is frozen is killed after `claim_s`."""
TOKENS_TIMEOUT_S = 300.0
"""Tokens of all trajectories in flight travel through Ray's object store."""
LOG_TIMEOUT_S = 10.0
"""A worker answers at once. What a silent one does not log is generated again after a death."""
STOP_TIMEOUT_S = 60.0
"""A worker that stops cancels its tasks and waits until they have ended."""
WORKER_START_TIMEOUT_S = 300.0
"""For a worker that is started again. Loading tokenizer and reward code takes a minute or two on a cold file system."""


class _Validation(NamedTuple):
    """Validation prompts that a worker runs."""

    rank: int
    worker: ActorHandle
    prompts: TensorDict
    ref: ray.ObjectRef


class _Known(NamedTuple):
    """What workers are told before they claim: a worker that is started again is told too."""

    places: ray.ObjectRef | None = None
    """Where the log of rollouts has what is replayed."""
    tokens: ray.ObjectRef | None = None
    """Tokens of a checkpoint and of the log; None: nobody needs any."""
    unclaimed: frozenset[str] = frozenset()
    """The trajectories whose tokens no worker had taken when the workers were asked last."""


class PartialRolloutAgentLoopManager(AgentLoopManagerTQ):
    """The agent-loop workers as the trainer sees them; lives in the trainer's process.

    `generate_sequences` admits training prompts to the prompt manager, from which the workers claim them. It pushes
    validation prompts to the workers, as verl does, and `wait_validation` waits for their end.
    `loops` are the workers' `run` calls: whoever waits for a batch waits for them too, so a claim loop that fails ends
    the run. A worker that dies is started again by `restart`, which another thread calls.
    """

    def __init__(self, *args: Any, prompt_manager: ActorHandle | None = None, **kwargs: Any) -> None:
        """`args` and `kwargs` are verl's; without `prompt_manager` the one of the cluster is found."""
        super().__init__(*args, **kwargs)
        settings = read_settings(self.config)
        self._settings, self._slot_shares = settings.block, settings.slot_shares
        self._prompt_manager = prompt_manager or find_manager()
        self._validations: list[_Validation] = []
        self.loops: dict[ray.ObjectRef, str] = {}
        self._oldest_version: int | None = None
        self._log_folders: tuple[LogFolder, ...] = ()
        """Where workers write the log, and before it where they wrote until the last checkpoint began."""
        self._is_running = False
        self.worker_ids = [f"agent_loop_worker_{rank}" for rank in range(len(self._slot_shares))]
        self._restored: frozenset[str] = frozenset()
        """Workers that got a checkpoint's tokens, and may have some left."""
        self._known = _Known()
        self._num_restarts, self._longest_validation_s = 0, 0.0
        self.engines: EngineRecovery | None = None
        """Brings engines back that die in validation; the trainer sets it."""
        self._swapped = threading.Condition()
        """Guards what a restart changes; notified when a worker has taken a dead one's place."""
        self._telling = threading.RLock()
        """Held by who changes what workers may go on from, from when it asks what they have until all know."""

    async def _init_agent_loop_workers(self) -> None:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        self.agent_loop_workers = [
            self._spawn(rank, nodes[rank % len(nodes)], share) for rank, share in enumerate(self._slot_shares)
        ]
        pings = [worker.ping.remote() for worker in self.agent_loop_workers]
        self._wait_all(pings, "start", self._settings.timeouts.start_s)

    def _spawn(self, rank: int, node_id: str, num_slots: int) -> ActorHandle:
        worker_id = self.worker_ids[rank]
        actor_class: Any = ray.remote(PartialRolloutAgentLoopWorker).options(
            # With a random end: Ray may not have freed the name of a dead worker when the next one starts.
            name=f"{worker_id}_{uuid4().hex[:8]}",
            # Soft: the node may be lost before the worker starts.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=True),
        )
        return actor_class.remote(
            worker_id,
            self._settings,
            num_slots,
            self.config,
            self.llm_client,
            self.teacher_client,
            self.reward_loop_worker_handles,
        )

    def start(self) -> None:
        """Start the workers' claim loops."""
        with self._swapped:
            self._is_running = True
            workers = enumerate(self.agent_loop_workers)
            self.loops = {worker.run.remote(): f"agent-loop worker {i}" for i, worker in workers}

    def stop(self) -> None:
        """Stop the claim loops and give their prompts back. Does nothing when they are not running."""
        with self._swapped:
            self._is_running = False
            loops, self.loops = self.loops, {}
        if not loops:
            return
        # Before `stop` is asked for, after which all of them end: these have ended by themselves.
        ended, _ = ray.wait(list(loops), num_returns=len(loops), timeout=0)
        self._ask_living([worker.stop.remote() for worker in self.agent_loop_workers], "stop", STOP_TIMEOUT_S)
        for answer in settle_all(ended, timeout_s=STOP_TIMEOUT_S, who_waits="trainer waits for claim loops to end"):
            if is_missing(answer):
                logger.warning("an agent-loop worker had died before it was stopped: %s", answer)

    def restart(self, rank: int) -> str:
        """Start a worker again that has died, under a new id; its prompts are pending again. Returns the new id.

        They go on from what the dead one has logged. Call this from one thread at a time.
        """
        dead = self.worker_ids[rank]
        # First, so that the living workers generate its prompts while the new one starts.
        self._give_back(dead)
        with self._swapped:
            # A new id: the prompt manager takes nothing more from the old one.
            self._num_restarts += 1
            self._restored -= {dead}
            self.worker_ids[rank] = f"agent_loop_worker_{rank}_again_{self._num_restarts}"
            share = self._slot_shares[rank]
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        worker = self._spawn(rank, nodes[rank % len(nodes)], share)
        self._wait_all([worker.ping.remote()], "start again", WORKER_START_TIMEOUT_S)
        calls = self._put_in_place(rank, worker)
        self._wait_all(calls, "take over from a dead one", HOLD_TIMEOUT_S)
        return self.worker_ids[rank]

    def _put_in_place(self, rank: int, worker: ActorHandle) -> list[ray.ObjectRef]:
        """Let a new worker know what the others do, then let it run in place of a dead one; returns open calls."""
        while True:
            known = self._known
            self._tell(worker, known)
            with self._swapped:
                if known is not self._known:
                    continue  # the others were told something else meanwhile, and this one was not among them
                self.agent_loop_workers[rank] = worker
                if known.tokens is not None:
                    self._restored |= {self.worker_ids[rank]}
                # Before `run`: the claim loop must not begin what this step holds back.
                calls = [worker.hold.remote([], self._oldest_version), worker.resize.remote(self._slot_shares[rank])]
                if self._log_folders:
                    calls.append(worker.begin_log.remote(self._log_folders[-1]))
                if self._is_running:
                    self.loops = {**self.loops, worker.run.remote(): f"agent-loop worker {rank}"}
                self._swapped.notify_all()
                return calls

    def _tell(self, worker: ActorHandle, known: _Known) -> None:
        """Wait until the worker knows it: Ray may run a call whose large arguments are there before an earlier one."""
        calls = [] if known.places is None else [worker.replay.remote(known.places)]
        if known.tokens is not None:
            calls.append(worker.restore_tokens.remote(known.tokens))
        self._wait_all(calls, "take over what is replayed", TOKENS_TIMEOUT_S)
        # A call also without tokens: the others may have forgotten them since this worker was told of them.
        self._wait_all([worker.keep_unclaimed.remote(known.unclaimed)], "forget tokens", HOLD_TIMEOUT_S)

    def _give_back(self, worker_id: str) -> None:
        """Let others generate the prompts of a dead worker, after the rows that it has written are gone.

        A report that it sent before its death may arrive meanwhile: it is refused, since its rows are gone. Workers
        get what it has logged before they can claim the prompts. A prompt that has lost too many workers is dropped.
        """
        who, call_s = "the run waits for the prompt manager", self._settings.timeouts.call_s
        limit_s = manager_limit_s(call_s)
        claims: list[Claim]
        claims = wait_for(self._prompt_manager.fence_worker.remote(worker_id), timeout_s=limit_s, who_waits=who)
        clear_trajectories([claim.uid for claim in claims], call_s)
        left = self._left_by(worker_id, claims)
        going_on = left.going_on if self._hand_on(left) else []
        released = self._prompt_manager.release_worker.remote(worker_id, going_on)
        result: ReleaseResult = wait_for(released, timeout_s=limit_s, who_waits=who)
        if result.dropped:
            self._let_go([claim.uid for claim in result.dropped])

    def _let_go(self, uids: Sequence[str]) -> None:
        """Clear the rows of dropped prompts; workers forget the tokens that were handed on, as nobody claims them."""
        call_bounded(
            lambda: tq.kv_clear(keys=list(uids), partition_id=PARTITION),
            timeout_s=self._settings.timeouts.call_s,
            who_waits=f"the run waits for TransferQueue to clear the rows of dropped prompts, {', '.join(uids)}",
        )
        self._hand_on(Left(frozenset(uids), {}, {}))

    def _left_by(self, worker_id: str, claims: Sequence[Claim]) -> Left:
        paths = [folder.file(worker_id) for folder in self._log_folders]
        try:
            return call_bounded(
                lambda: read_left(paths, claims),
                timeout_s=self._settings.timeouts.call_s,
                who_waits=f"the run waits for what {worker_id} has logged in {' and '.join(map(str, paths))}",
            )
        except (OSError, WaitTimeout) as error:
            logger.warning("what %s had is generated again: %s", worker_id, error)
            return Left(frozenset(claim.uid for claim in claims), {}, {})

    def _hand_on(self, left: Left) -> bool:
        """Give what a dead worker had to all workers, and to those that are started again later.

        False: not all of them have it, so nobody may go on from it.
        """
        if not left.uids:
            return True
        ref = ray.put(left)
        with self._telling:
            known = self._joined(left)
            # In one piece, as in `resize`.
            with self._swapped:
                others = frozenset(key for key in self._known.unclaimed if prompt_of(key) not in left.uids)
                self._known = known or self._known._replace(places=None, unclaimed=others)
                if left.tokens:
                    self._restored = frozenset(self.worker_ids)
                calls = [worker.take_over.remote(ref) for worker in self.agent_loop_workers]
            return self._inform(calls, "take over what a dead worker had") and known is not None

    def _joined(self, left: Left) -> _Known | None:
        """What a worker that is started again later is told, with what a dead one had; None: it cannot be read."""
        known = self._known
        tokens, missing = self._unclaimed_tokens()
        try:
            places = {} if known.places is None else ray.get(known.places, timeout=TOKENS_TIMEOUT_S)
        except (GetTimeoutError, ObjectLostError) as error:
            places, missing = {}, [*missing, f"places of logged responses: {error}"]
        if missing:
            logger.warning("what a dead worker had is generated again: %s", "; ".join(missing))
            return None
        tokens, places = left.newest(tokens, left.tokens), left.newest(places, left.places)
        return _Known(ray.put(places) if places else None, ray.put(tokens) if tokens else None, frozenset(tokens))

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Admit training prompts, or dispatch validation prompts; does not wait for tokens."""
        if prompts.get("validate", None) is not None:
            self._dispatch_validation(prompts)
        else:
            self._admit(prompts)

    def wait_validation(self, timeout_s: float) -> None:
        """Wait until every dispatched validation prompt is in TransferQueue.

        What a worker had that died is validated by the worker that takes its place.
        """
        validations, self._validations = self._validations, []
        began_s = time.monotonic()
        self._recover_engines([each.ref for each in validations], timeout_s)
        answers = self._ask_living([each.ref for each in validations], "finish validation", timeout_s)
        self._longest_validation_s = max(self._longest_validation_s, time.monotonic() - began_s)
        lost = [each for each, answer in zip(validations, answers, strict=True) if isinstance(answer, RayActorError)]
        for each in lost:
            worker = self._successor(each.rank, each.worker)
            self._validations.append(each._replace(worker=worker, ref=worker.validate.remote(each.prompts)))
        if lost:
            self.wait_validation(timeout_s)

    def _recover_engines(self, refs: Sequence[ray.ObjectRef], timeout_s: float) -> None:
        """Until all `refs` are ready, but `timeout_s` at most: bring engines back that die meanwhile."""
        late, sound_s = list(refs), UNUSUAL * self._longest_validation_s
        waiting = Wait("trainer waits for agent-loop workers to finish validation", timeout_s, sound_s)
        while self.engines is not None and late and not waiting.is_over:
            ready, _ = ray.wait([*late, *self.engines.deaths], num_returns=1, timeout=waiting.step_s())
            late = [ref for ref in late if ref not in ready]
            self.engines.look(ready)
            waiting.look(f"{len(late)} of {len(refs)}")

    def _successor(self, rank: int, dead: ActorHandle) -> ActorHandle:
        with self._swapped:
            if not self._swapped.wait_for(lambda: self.agent_loop_workers[rank] is not dead, WORKER_START_TIMEOUT_S):
                raise ActorLost(f"agent-loop worker {rank} died in validation, and nobody has taken its place")
            return self.agent_loop_workers[rank]

    def hold(self, claims: Sequence[Claim], oldest_version: int | None) -> None:
        """Hold back the trajectories of deferred prompts, and end those with older tokens than `oldest_version`.

        Returns when every worker knows. Each trajectory finds out before its next request to an engine.
        """
        if claims or oldest_version is not None:
            # Under the lock, as in `resize`: a worker that takes a dead one's place meanwhile is told by `restart`.
            with self._swapped:
                self._oldest_version = oldest_version
                calls = [worker.hold.remote(claims, oldest_version) for worker in self.agent_loop_workers]
            self._ask_living(calls, "hold", HOLD_TIMEOUT_S)

    def replace_reward_worker(self, number: int, worker: ActorHandle) -> None:
        """Tell every agent-loop worker of a reward worker that was started again."""
        calls = [each.replace_reward_worker.remote(number, worker) for each in self.agent_loop_workers]
        self._ask_living(calls, "take over a reward worker", HOLD_TIMEOUT_S)

    def resize(self, num_slots: int) -> None:
        """Share `num_slots` among the workers, in whole prompt groups."""
        shares = share_slots(num_slots, num_workers=len(self.agent_loop_workers), group=self.rollout_config.n)
        # In one piece: a worker that takes a dead one's place meanwhile would start with its old share, unasked.
        with self._swapped:
            self._slot_shares = list(shares)
            calls = [worker.resize.remote(share) for worker, share in zip(self.agent_loop_workers, shares, strict=True)]
        self._ask_living(calls, "take over their slots", HOLD_TIMEOUT_S)

    def tokens_in_flight(self) -> tuple[Saved, list[str]]:
        """Tokens of all trajectories in flight, and of restored ones that nobody has claimed yet, by `{uid}_{session}`.

        All workers forget what one of them has started. A trajectory may start after its worker was asked: then that
        worker sends it too, and that answer counts.
        A worker that is dead or silent costs its own tokens only: the second value says who, and why.
        """
        with self._telling:
            asked = list(zip(self.worker_ids, self.agent_loop_workers, strict=True))
            answers = self._ask_unclaimed(asked)
            kept = self._keep(asked, answers)
            living = [each for each, answer in zip(asked, answers, strict=True) if not is_missing(answer)]
            calls = [worker.tokens_in_flight.remote(kept) for _, worker in living]
            found = self._settle(calls, "hand over their tokens", TOKENS_TIMEOUT_S)
            self._note_told(living, found)
            sent = dict(zip((name for name, _ in living), found, strict=True))
            merged, missing = self._unclaimed_tokens()
            for (name, _), answer in zip(asked, answers, strict=True):
                tokens = sent.get(name, answer)
                if is_missing(tokens):
                    missing.append(f"{name}: {tokens}")
                else:
                    merged |= tokens
            return merged, missing

    def _unclaimed_tokens(self) -> tuple[Saved, list[str]]:
        """Restored tokens that no worker had taken, and why they are missing.

        They are read here: a worker that sends them could die of it.
        """
        known = self._known
        if known.tokens is None:
            return {}, []
        try:
            saved: Saved = ray.get(known.tokens, timeout=TOKENS_TIMEOUT_S)
        except (GetTimeoutError, ObjectLostError) as error:
            return {}, [f"{len(known.unclaimed)} restored responses that nobody has claimed: {error}"]
        return {key: calls for key, calls in saved.items() if key in known.unclaimed}, []

    def restore_tokens(self, saved: Saved) -> None:
        """Give every worker the tokens of an earlier start: any of them may claim the prompt."""
        with self._telling:
            # Put once: as an argument, the tokens of the whole checkpoint would be copied for each worker.
            ref = ray.put(saved)
            with self._swapped:
                self._known = self._known._replace(tokens=ref if saved else None, unclaimed=frozenset(saved))
                self._restored = frozenset(self.worker_ids) if saved else frozenset()
                calls = [worker.restore_tokens.remote(ref) for worker in self.agent_loop_workers]
            self._ask_living(calls, "take over tokens", TOKENS_TIMEOUT_S)

    def go_back(self, keys: Collection[str], before: Saved) -> None:
        """Let trajectories of `keys`, `{uid}_{session}` each, go on from `before`, not from what was restored since.

        One that is not in `before` begins afresh; one that a worker has started already stays as it is.

        The trainer calls it once after its start at most, when the replay of the log ends early, as in an admission.
        All restored tokens that nobody has claimed are read and put once more then, since a stored object cannot be
        changed: no more than `restore_tokens` has put, a few MB for most runs.
        """
        with self._telling:
            saved, missing = self._unclaimed_tokens()
            change: dict[str, Any]
            if missing:
                # The others stay: the next checkpoint reads them again. Workers started again have none of `keys`.
                logger.warning(
                    "workers that are started again have none of the tokens replaced now: %s", "; ".join(missing)
                )
                change = {"unclaimed": self._known.unclaimed.difference(keys)}
            else:
                kept = {key: calls for key, calls in saved.items() if key not in keys}
                kept |= {key: calls for key, calls in before.items() if key in self._known.unclaimed}
                change = {"unclaimed": frozenset(kept), "tokens": ray.put(kept) if kept else None}
            replaced = ray.put(before)
            # In one piece, as in `resize`.
            with self._swapped:
                self._known = self._known._replace(**change)
                calls = [each.go_back.remote(frozenset(keys), replaced) for each in self.agent_loop_workers]
            self._inform(calls, "go back to the tokens of the checkpoint")

    def forget_claimed(self) -> None:
        """Let all workers forget the restored tokens of trajectories that one of them has started, until none is left.

        Without it each worker would keep all of a checkpoint's tokens where no further checkpoint follows.
        """
        with self._telling:
            if not self._restored:
                return
            asked = list(zip(self.worker_ids, self.agent_loop_workers, strict=True))
            answers = self._ask_unclaimed(asked)
            if any(map(is_missing, answers)):
                return  # after the next step again
            kept = self._keep(asked, answers)
            calls = [worker.keep_unclaimed.remote(kept) for _, worker in asked]
            self._note_told(asked, self._settle(calls, "forget tokens", HOLD_TIMEOUT_S))

    def _keep(self, asked: Sequence[tuple[str, ActorHandle]], answers: Sequence[Any]) -> frozenset[str]:
        """Note and return which restored trajectories no worker has started; their tokens go once there are none.

        A worker that is not among `_restored` has never had any, and says nothing of the others.
        """
        named = zip(asked, answers, strict=True)
        unstarted = [each for (name, _), each in named if name in self._restored and not is_missing(each)]
        with self._swapped:
            kept = self._known.unclaimed.intersection(*unstarted)
            self._known = self._known._replace(unclaimed=kept, tokens=self._known.tokens if kept else None)
        return kept

    def _note_told(self, told: Sequence[tuple[str, ActorHandle]], answers: Sequence[Any]) -> None:
        """Ask those no more who have forgotten the last restored token; who was silent then may still have some."""
        named = zip(told, answers, strict=True)
        with self._swapped:
            if not self._known.unclaimed:
                self._restored -= {name for (name, _), answer in named if not is_missing(answer)}

    def _ask_unclaimed(self, asked: Sequence[tuple[str, ActorHandle]]) -> list[Any]:
        calls = [worker.unclaimed.remote() for _, worker in asked]
        return self._settle(calls, "name unstarted trajectories", TOKENS_TIMEOUT_S)

    def begin_log(self, folder: LogFolder) -> None:
        """Let all workers write the log of rollouts into this folder from now on."""
        with self._swapped:
            self._log_folders = (*self._log_folders[-1:], folder)
            calls = [worker.begin_log.remote(folder) for worker in self.agent_loop_workers]
        for answer in self._settle(calls, "begin a file of the log", LOG_TIMEOUT_S):
            if is_missing(answer):
                logger.warning("the log of rollouts has nothing of an agent-loop worker: %s", answer)

    def replay(self, places: Mapping[str, Place]) -> None:
        """Tell all workers which trajectories are replayed: any of them may claim the prompt."""
        with self._telling:
            ref = ray.put(places)
            # In one piece, as in `resize`.
            with self._swapped:
                self._known = self._known._replace(places=ref)
                calls = [each.replay.remote(ref) for each in self.agent_loop_workers]
            # A worker takes both in their order only if it has answered before it is told that there is nothing.
            if places:
                self._ask_living(calls, "replay", TOKENS_TIMEOUT_S)
            else:
                self._inform(calls, "replay nothing more")

    def raise_if_ended(self, ready: Sequence[ray.ObjectRef]) -> None:
        """Raise what ended a claim loop, if one of `ready` is such a loop."""
        for ref in ready:
            if ref not in self.loops:
                continue
            try:
                ray.get(ref)
            except RayActorError:
                # Whoever watches the actors decides: the dead worker is started again, or its death ends the run.
                with self._swapped:
                    self.loops = {loop: name for loop, name in self.loops.items() if loop != ref}
            else:
                raise ActorLost(f"{self.loops[ref]} ended its claim loop while the run goes on")

    def _dispatch_validation(self, prompts: TensorDict) -> None:
        # Fewer chunks than workers, where prompts are few.
        chunks = prompts.chunk(len(self.agent_loop_workers))
        self._validations += [
            _Validation(rank, worker, chunk, worker.validate.remote(chunk))
            for rank, (worker, chunk) in enumerate(zip(self.agent_loop_workers, chunks, strict=False))
        ]

    def _admit(self, prompts: TensorDict) -> None:
        step = int(prompts["global_steps"])
        uids = cast("Sequence[str]", prompts["uid"])
        metas = [
            PromptMeta(uid=uid, num_trajectories=self.rollout_config.n, global_step=step, source_index=str(index))
            for uid, index in zip(uids, prompts["index"], strict=True)
        ]
        wait_for(
            self._prompt_manager.admit.remote(metas),
            timeout_s=manager_limit_s(self._settings.timeouts.call_s),
            who_waits="trainer waits for the prompt manager to admit prompts",
        )

    @staticmethod
    def _wait_all(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        return wait_for_all(refs, timeout_s=timeout_s, who_waits=f"trainer waits for agent-loop workers to {what}")

    @staticmethod
    def _settle(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        return settle_all(refs, timeout_s=timeout_s, who_waits=f"trainer waits for agent-loop workers to {what}")

    def _inform(self, refs: Sequence[ray.ObjectRef], what: str) -> bool:
        """Wait until all know; a silent worker costs a warning. Returns whether all living ones have answered.

        For what the trainer says while it admits prompts, which has a deadline: `_ask_living` waits for `claim_s` too.
        """
        late = [answer for answer in self._settle(refs, what, HOLD_TIMEOUT_S) if isinstance(answer, WaitTimeout)]
        for answer in late[:1]:
            logger.warning("%s; whoever was silent does so when it goes on, or another worker in its place", answer)
        return not late

    def _ask_living(self, refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        """All answers, as in `_wait_all`; a dead worker's is its RayActorError: another worker takes its place.

        A frozen worker is dead after `timeouts.claim_s`, for which this waits too: from when the prompt manager, which
        kills it, was replaced, where that is frozen as well.
        """
        timeouts = self._settings.timeouts
        answers = self._settle(refs, what, timeout_s + timeouts.claim_s + manager_limit_s(timeouts.call_s))
        for answer in answers:
            if isinstance(answer, WaitTimeout):
                raise answer
        return answers


def clear_trajectories(uids: Sequence[str], timeout_s: float) -> None:
    """Clear the rows of all trajectories of these prompts; the prompts' own rows stay."""
    if not uids:
        return
    owners = set(uids)

    def clear() -> None:
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        # `{uid}_{session}_{index}`; a uid may have underscores too, and is the key of the prompt's own row.
        keys = [key for key in rows if key.count("_") >= 2 and key.rsplit("_", 2)[0] in owners]
        if keys:
            tq.kv_clear(keys=keys, partition_id=PARTITION)

    who = f"the run waits for TransferQueue to clear trajectories of {len(uids)} prompts of a dead worker"
    call_bounded(clear, timeout_s=timeout_s, who_waits=who)
