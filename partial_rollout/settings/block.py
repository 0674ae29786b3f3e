"""The `partial_rollout` configuration block: every key with its default, what it means, who needs it and the evidence.

This file is the one place where a key is described. `python -m partial_rollout.settings` makes
configs/partial_rollout/default.yaml and the table of docs/configuration.md from it.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic_core import ErrorDetails

logger = logging.getLogger(__name__)

BLOCK = "partial_rollout"
RETIRED_KEYS = {
    "event_log": f"set {BLOCK}.events to a folder, or leave it out: the run's event stream has what the log had",
    "manager": "leave the block out: a Ray cluster carries one run, whose prompt manager has one name",
    "slots.most": f"leave it out: {BLOCK}.prefetch_factor bounds the prompts in flight, tail.max_staleness the age of "
    "their tokens, and slots.adaptive=false with num_slots keeps the number of slots as it is",
    "tail.max_deferrals": "leave it out: a prompt that was deferred 8 times is trained next; for fewer set "
    f"{BLOCK}.tail.max_deferred_per_round, which bounds how many deferred prompts a round has",
    "weights.timeout_s": f"set {BLOCK}.timeouts.resume_s to ten times as much: an engine waits a tenth of it for a "
    "silent training rank",
    "slots.kv_high": "leave it out: the KV cache counts as full when 90 % are in use",
    "tail.boundary": "leave it out: the end of a step interrupts what is unfinished, as tail.boundary=now did",
    "packing.per_rank_batch_size": f"leave it out: {BLOCK}.packing.token_budget bounds what a row holds",
    "packing.cost_model": "leave it out: the model's own sizes say what a row costs, and verl's formula does where the "
    "model has none",
    "costs": "leave the block out: only tail.boundary=cost read it, which is retired as well",
}
"""Keys of release 0.1 below the block, and what to do instead; 0.3 knows them no more."""
_NO_PLANNER = f"leave {BLOCK}.packing.planner out, or set it to verl"
RETIRED_VALUES = {
    ("packing.planner", "fixed"): _NO_PLANNER,
    ("packing.planner", "budget"): _NO_PLANNER,
    ("tail.interrupt_mode", "keep"): f"set {BLOCK}.tail.interrupt_mode=abort, which computes as much again and "
    "holds no request in the engine, or keep_kv, which computes nothing again",
}
"""Values of release 0.1 that no longer exist, of keys that do, and what to do instead."""

OLD_NAME_OF_WAIT = "sync"
"""The name of `wait` in release 0.1; accepted until 0.3, because jobs in flight should not stop for a name."""
AUTO = "auto"
"""Value of a key that the run chooses; `settings.auto` has the choices."""
SEPARATE = "separate"
"""Value of `placement`: engines on devices of their own."""
PREFETCH_FACTOR = 2.0
"""Batches in flight where nobody chose another number."""
DEEPEST = 3.0
"""Batches in flight up to which `auto` goes: no difference in learning was seen (docs/results/gpu.md)."""
OVER_SAMPLING = 1.25
"""Groups of a short round in batches: the original reorder rollout's example, 10 for 8."""
MAX_EVENTS_TEXT = 4096
"""Tokens; the page shows no more of a response than the events of its requests have."""
MAX_OVER_SAMPLING = 2
"""A round that generates more than this many batches leaves more groups behind than it trains."""
CLOSE = 0.8
"""Two names that are at least this alike (difflib's ratio) are taken for a slip of the pen."""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise ConfigError for the key, its value and what is allowed, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}={value!r} is not allowed: must be {allowed} (set {key}=...)")


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    require(condition, f"{BLOCK}.{key}", value, allowed)


def _key(default: Any, means: str, *, who: str, evidence: str, **limits: Any) -> Any:
    """Describe a key: what it means, who needs it, and the measurement or the need that speaks for it."""
    return Field(default, description=means, json_schema_extra={"who": who, "evidence": evidence}, **limits)


def _bound_s(default: float, means: str, *, who: str, evidence: str) -> Any:
    return _key(default, means, who=who, evidence=evidence, gt=0)


class _Block(BaseModel):
    """A block of keys, which may not change and has no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TimeoutConfig(_Block):
    """Upper bounds of all waits, in seconds; on expiry the error names who waited for whom."""

    start_s: float = _bound_s(
        1800.0,
        "Ray's first worker process must run this long after Ray, and all processes must have started, with the first "
        "weights in the engines, so long after that. After a fifth of it (360 s) a warning says what has not started.",
        who="slow disks, very large models",
        evidence="docs/results/gpu.md: first steps of recipes came 163 to 301 s after the start; larger models take "
        "longer",
    )
    resources_s: float = _bound_s(
        30.0,
        "Cluster resources must be there this long after the start.",
        who="clusters that add nodes on demand, which takes minutes",
        evidence="a need: too few GPUs should be told in half a minute, and a cluster that grows should be waited for",
    )
    drain_s: float = _bound_s(
        60.0,
        "From closing the gate to an empty engine. An engine that has not paused after half of it is ended as a dead "
        "one.",
        who="very large engines",
        evidence="drain and resume take 0.7 to 3.5 % of a step on average, up to 5 % of one, docs/results/gpu.md",
    )
    resume_s: float = _bound_s(
        600.0,
        "A weight update of all engines, relaunching engines, opening the gates: each. Within an update an engine "
        "waits a tenth of it (60 s) for a silent training rank, and a rank a twentieth (30 s) for a silent engine. An "
        "engine that has not released its memory, or not gone on, after a tenth is ended as a dead one.",
        who="large models, whose engines take longer to start or whose largest tensor takes longer to gather",
        evidence="a measured update of 4B takes 0.3 s, the start of an 8B engine 106 to 203 s, docs/results/gpu.md",
    )
    batch_s: float = _bound_s(
        7200.0,
        "One training batch. A prompt that is with a worker for longer, while batches fill from others, is named once "
        "in a warning.",
        who="very long responses, slow tools or rewards",
        evidence="a need: a batch of long responses may take an hour, and one that never fills must end",
    )
    train_s: float = _bound_s(
        1800.0,
        "What a step does besides generating and sending weights: training it, saving it, reporting it, and what a "
        "validation does besides its wait, each. The limit is the larger of this and 20 times the longest time so far; "
        "until one of its kind has ended, four times this (7,200 s by default). Past it the log has the stacks of the "
        "training ranks, those that have an open call are killed, and training is started again from its last "
        "checkpoint. After a tenth of the limit a warning names them.",
        who="lower: small models. Higher: a first step whose training or saving takes more than two hours",
        evidence="a job whose loss hangs, in `make faults`",
    )
    stall_s: float = _bound_s(
        30.0,
        "An engine that holds requests may be silent for so long beyond its longest pause so far, and for ten times as "
        "long (300 s by default) until its first tokens; then it is ended as a dead one.",
        who="engines that pause for longer on purpose",
        evidence="frozen engines in `make faults`; a sound engine hands tokens over every second or so",
    )
    claim_s: float = _bound_s(
        300.0,
        "A process of the run may give no sign of life for so long. An agent-loop worker gives none when its event "
        "loop does not turn and none of its trajectories goes on. After a tenth of the time a warning names the "
        "process. At its end the process is killed, and the run does what it does for a killed one "
        "(docs/troubleshooting.md).",
        who="agent loops whose code blocks their event loop for longer in one piece",
        evidence="frozen workers and managers in `make faults`",
    )
    tool_s: float = _bound_s(
        1800.0,
        "A tool call, and anything else that an agent loop does between two responses. Past it the attempt of the "
        "prompt fails, and max_attempts says whether there is another one. After a tenth of it a warning names the "
        "prompt.",
        who="lower: runs in which a tool may hang. Higher: tools that take longer, or are waited for in a line",
        evidence="a need: tools run code and call services, which hang or queue",
    )
    reward_s: float = _bound_s(
        1800.0,
        "The reward of a response, from the end of its agent loop until it is scored and stored; past it as with "
        "tool_s.",
        who="lower: runs in which a reward may hang. Higher: rewards that take longer, as those of another model may",
        evidence="a need: rewards call judges and sandboxes, which hang or queue",
    )
    call_s: float = _bound_s(
        60.0,
        "Any other call between our actors.",
        who="busy clusters",
        evidence="under a saturating load 99 % of the manager's calls take less than 0.1 s, docs/results/cpu.md",
    )
    stop_s: float = _bound_s(
        60.0,
        "The end of a run from Ctrl-C, SIGTERM, an error or a dead process on, a last checkpoint included. What is not "
        "saved or ended by then is left out, or ended by force.",
        who="runs whose end takes longer",
        evidence="a need: the last checkpoint of a large model on a slow file system takes minutes",
    )

    @property
    def weights_s(self) -> float:
        """How long an engine waits in a weight update for a silent training rank."""
        return self.resume_s / 10


class PackingConfig(_Block):
    """Which samples train together, on which rank and in which micro-batch (log-probs, reference and update)."""

    planner: Literal["auto", "global", "verl"] = _key(
        AUTO,
        "global: few micro-batches under the token budget, rows even in what they cost the model. verl: verl's own "
        "balancing and micro-batches. auto: global where the trainer has what it needs (FSDP), else verl.",
        who="`verl`: a doubt about our planner",
        evidence="on two GPUs `global` takes 0.49 of verl's time with padded rows; with packed ones three batches do "
        "not tell them apart; docs/design/0004",
    )
    token_budget: int | None = _key(
        None,
        "Tokens of a row at most; a longer sample gets a row of its own. null: the memory that verl's settings allow. "
        "actor.use_dynamic_bsz=False: actor.ppo_micro_batch_size_per_gpu x (data.max_prompt_length + "
        "data.max_response_length). True: the least of actor.ppo_max_token_len_per_gpu and rollout's and ref's "
        "log_prob_max_token_len_per_gpu, times the sequence-parallel size. The log says which.",
        who="training that runs out of memory, or leaves much of it free",
        evidence="a need: rows are what training memory is spent on",
        ge=1,
    )


def _renamed(policy: object) -> object:
    if policy != OLD_NAME_OF_WAIT:
        return policy
    _warn_of_old_name()
    return "wait"


@cache
def _warn_of_old_name() -> None:
    given = f"{BLOCK}.tail.policy"
    logger.warning(
        "%s=%s is called %s=wait since release 0.2; 0.3 refuses the old name", given, OLD_NAME_OF_WAIT, given
    )


class TailConfig(_Block):
    """What becomes of a batch's longest responses, see docs/design/0006.

    Three policies for a batch of 8 prompts, by how many prompts a round generates at the same time:

    >>> [TailConfig(policy=name).groups_per_round(8) for name in ("partial", "wait", "reorder")]
    [8, 8, 10]

    A key that the policy does not use is refused:

    >>> PartialRolloutConfig.from_mapping({"tail": {"policy": "wait", "gen_batch_size": 10}})
    Traceback (most recent call last):
    partial_rollout.errors.ConfigError: partial_rollout.tail.gen_batch_size=10 is not allowed: must be null with ...
    """

    policy: Annotated[Literal["partial", "wait", "reorder"], BeforeValidator(_renamed)] = _key(
        "partial",
        "partial: unfinished responses are interrupted at the end of the step and go on in the next. wait: the step "
        "waits for all of its batch. reorder: more prompts are generated than trained; what is unfinished is deferred "
        "with its tokens and trained together.",
        who="`wait`: on-policy training. `reorder`: rounds that train what they begin, with even lengths",
        evidence="docs/design/0006 and the measured results compare the three",
    )
    gen_batch_size: int | None = _key(
        None,
        "For policy=reorder. Prompts of a round, above data.train_batch_size; null: 1.25 times as many.",
        who="runs that choose how much of a round is left behind",
        evidence="1.25 is the original reorder rollout's example",
        ge=1,
    )
    max_deferred_per_round: int | None = _key(
        None,
        "For policy=reorder. So many deferred prompts at most join each round; null: a batch of them gets a round of "
        "its own.",
        who="runs where a batch of long responses only would disturb learning",
        evidence="docs/design/0006: the bound on deferrals with and without it; a benchmark mode",
        ge=1,
    )
    max_staleness: int | None = _key(
        None,
        "Tokens sampled by weights that are older than so many updates are past the bound; null: there is none.",
        who="learning that suffers from old tokens",
        evidence="a need: every peer has such a bound; docs/design/0006",
        ge=0,
    )
    interrupt_mode: Literal["auto", "abort", "keep_kv", "reuse_kv", "offload_kv"] = _key(
        AUTO,
        "What an interrupted request leaves in its engine. abort: nothing; it is re-prefilled by the new weights. "
        "keep_kv: it stays there with its KV. reuse_kv: it leaves and finds its KV in the prefix cache. offload_kv: KV "
        "goes to host memory, so that engine memory can be released (GPU only). auto: reuse_kv where engines keep "
        "their memory, offload_kv where host memory has room, else abort; keep_kv with placement=separate.",
        who="a mode for a comparison; `keep_kv` where engines keep their memory",
        evidence="retained KV is the fastest mode that was measured on GPUs; docs/design/0010",
    )
    offload_gib: int | None = _key(
        None,
        "For interrupt_mode=offload_kv, which needs it, and auto. Host memory of each engine, GiB over all of its "
        "ranks; as pinned memory it can take twice as much, which doctor tells. null, with auto: the KV of all slots, "
        "at most a share of the node's free memory.",
        who="interrupt_mode=offload_kv; nodes whose memory other programs need as well",
        evidence="docs/design/0010: the arithmetic",
        ge=1,
    )
    keep_engine_memory: bool = _key(
        False,
        "For interrupt_mode=auto. true: where each GPU certainly has room for engine and training together, engines "
        "keep their memory while the model trains (actor_rollout_ref.rollout.free_cache_engine=False), so that auto "
        "takes reuse_kv; decided at the start, on the cluster. false: the log and doctor say what a GPU would need.",
        who="GPUs with room for both",
        evidence="docs/design/0010: the arithmetic; retained KV is the fastest mode that was measured on GPUs",
    )
    past_staleness: Literal["train", "mask", "drop", "finish", "restart"] = _key(
        "train",
        "What becomes of tokens past the bound. train: they are trained, corrected as all old tokens are, and counted; "
        "the bound only limits the prompts in flight. mask: they are left out of the loss, which favours short "
        "responses. drop: their prompt is dropped, and another takes its place. restart: they are thrown away and the "
        "prompt begins again, max_attempts times at most. finish: there are none, because the update before waits for "
        "the responses that would pass the bound.",
        who="whoever sets max_staleness",
        evidence="docs/design/0006: what each costs",
    )

    @model_validator(mode="after")
    def _check(self) -> TailConfig:
        """Refuse a key that the others leave without use."""
        past, bound = self.past_staleness, self.max_staleness
        unbounded = f"train without a bound: set {BLOCK}.tail.max_staleness as well"
        _require(past == "train" or bound is not None, "tail.past_staleness", past, unbounded)
        for name in ("gen_batch_size", "max_deferred_per_round"):
            value = getattr(self, name)
            unused = f"null with {BLOCK}.tail.policy={self.policy}, which defers nothing: policy=reorder uses it"
            _require(value is None or self.policy == "reorder", f"tail.{name}", value, unused)
        mode, key, size = self.interrupt_mode, "tail.interrupt_mode", self.offload_gib
        unused = f"abort with {BLOCK}.tail.policy=wait, which interrupts nothing"
        _require(mode in (AUTO, "abort") or self.policy != "wait", key, mode, unused)
        leaves = f"abort, reuse_kv or offload_kv with {BLOCK}.tail.policy=reorder: what it defers leaves the engine"
        _require(mode != "keep_kv" or self.policy != "reorder", key, mode, leaves)
        given = f"a number of GiB with {BLOCK}.tail.interrupt_mode=offload_kv, and null with any other but auto"
        _require(mode == AUTO or (size is not None) == (mode == "offload_kv"), "tail.offload_gib", size, given)
        return self

    def groups_per_round(self, train_batch_size: int) -> int:
        """Prompt groups in generation at the same time, by default."""
        if self.policy != "reorder":
            return train_batch_size
        return self.gen_batch_size or math.ceil(OVER_SAMPLING * train_batch_size)

    def check_batch(self, train_batch_size: int) -> None:
        """Raise ConfigError for sizes that do not fit a batch of `train_batch_size` prompts."""
        size, most = self.groups_per_round(train_batch_size), MAX_OVER_SAMPLING * train_batch_size
        allowed = f"above data.train_batch_size={train_batch_size} and at most {most}"
        _require(
            self.policy != "reorder" or train_batch_size < size <= most,
            "tail.gen_batch_size",
            size,
            f"{allowed}; to train all that is started use {BLOCK}.tail.policy=wait",
        )
        few = self.max_deferred_per_round
        allowed = f"at most data.train_batch_size={train_batch_size}: one round cannot train more"
        _require(few is None or few <= train_batch_size, "tail.max_deferred_per_round", few, allowed)


class SlotsConfig(_Block):
    """Whether the number of trajectory slots follows the engines' load; it starts at num_slots."""

    adaptive: Literal["auto"] | bool = _key(
        AUTO,
        "true: the number of slots is raised while all are in use and the engines have room, and lowered when requests "
        "are preempted or the KV cache is full; with tail.policy=partial only. Turns vLLM's statistics on "
        "(actor_rollout_ref.rollout.disable_log_stats=False). auto: true where KV is retained, from half of "
        "num_slots upwards, unless num_slots or disable_log_stats=True was set, or more slots would end drafts.",
        who="`false`: runs with a fixed number of slots",
        evidence="the fastest mode that was measured on GPUs is adaptive",
    )
    least: int | None = _key(
        None,
        "Lower bound of an adaptive number; null: rollout.n for each agent-loop worker, with auto half of the number "
        "to start with. The upper bound is all prompts that may be in flight x rollout.n.",
        who="runs that must not fall below a rate",
        evidence="auto sets it; computed for KV caches of several sizes: docs/design/0010",
        ge=1,
    )
    interval_s: float = _key(
        5.0,
        "Seconds between two looks at the engines while a batch is waited for; there is one at its end in any case, "
        "and one in the middle of a wait that is shorter.",
        who="steps shorter than some tens of seconds",
        evidence="the measured runs and tests with short steps set it",
        gt=0,
    )

    @model_validator(mode="after")
    def _check(self) -> SlotsConfig:
        """Refuse a bound of a number that does not move."""
        unused = f"null with {BLOCK}.slots.adaptive=false: the number of slots is {BLOCK}.num_slots"
        _require(self.least is None or self.adaptive is not False, "slots.least", self.least, unused)
        return self

    @property
    def are_adaptive(self) -> bool:
        """Whether the number moves; `auto` that nothing has chosen a value for counts as false."""
        return self.adaptive is True


class WeightsConfig(_Block):
    """How new weights travel from the training workers to the engines."""

    backend: Literal["auto", "channel", "verl"] = _key(
        "auto",
        "channel: ours, in a GPU's own memory or over shared memory. verl: verl's own. auto: channel where it has all "
        "that the run needs.",
        who="`verl`: a doubt about the channel",
        evidence="docs/design/0005: what the channel is measured against",
    )
    bucket_mb: int | None = _key(
        None,
        "Weights travel in pieces of this size; each pair of ranks needs three of them, on the GPU or in /dev/shm. "
        "null: 256 on a GPU, 8 in /dev/shm.",
        who="a small /dev/shm (docker), or a GPU without room for 768 MB",
        evidence="docs/design/0005: rates by size",
        ge=1,
    )
    encrypt: bool = _key(
        False,
        "For placement=separate. true: weights to an engine on another node are encrypted (ZeroMQ's CURVE). false: as "
        "the traffic of Ray and NCCL, only who takes part is checked.",
        who="clusters whose network others can read",
        evidence="a need; docs/design/0015: what it costs",
    )
    validate_values: bool = _key(
        False,
        "Refuse NaN and Inf; costs one more pass over the weights in the engine.",
        who="a training that diverges for unknown reasons",
        evidence="a need: the error names the tensor",
        alias="validate",
    )
    relaunches: int = _key(
        1,
        "Engines that an update failed in are started again and sent all weights, at most so often in one update; then "
        "training starts again. With 0 it starts again after each death of an engine, also while it generates.",
        who="0, with restarts=0: whoever wants to look at a failed engine",
        evidence="tests with killed engines; docs/design/0005",
        ge=0,
    )

    @property
    def buffer_bytes(self) -> int | None:
        """Size of one buffer; None leaves it to the transport."""
        return None if self.bucket_mb is None else self.bucket_mb << 20


class PartialRolloutConfig(_Block):
    """All settings of this package.

    >>> settings = PartialRolloutConfig.from_mapping({"num_slots": 64, "tail": {"interrupt_mode": "reuse_kv"}})
    >>> settings.num_slots, settings.tail.interrupt_mode, settings.timeouts.drain_s
    (64, 'reuse_kv', 60.0)

    What is mistyped is refused with what was perhaps meant:

    >>> PartialRolloutConfig.from_mapping({"prefech_factor": 3})
    Traceback (most recent call last):
    partial_rollout.errors.ConfigError: unknown key partial_rollout.prefech_factor: did you mean ...prefetch_factor? ...
    """

    placement: Literal["shared", "separate"] = _key(
        "shared",
        "shared: engines and training share the trainer's GPUs and take turns. separate: engines have GPUs of their "
        "own (actor_rollout_ref.rollout.nnodes x n_gpus_per_node) and are interrupted for a weight update only.",
        who="`separate`: runs in which training and generation take about equally long, on 2 GPUs or more",
        evidence="docs/design/0015; tests on a CPU over one node and two",
    )
    prefetch_factor: Annotated[float, Field(ge=1)] | Literal["auto"] = _key(
        AUTO,
        "Prompts in flight (pending + ongoing + done) are capped at prefetch_factor x data.train_batch_size; with "
        "tail.policy=partial only, which defers none. auto: 2, and where KV is retained up to 3 while slots "
        "idle for want of prompts; at most tail.max_staleness + 1, with placement=separate tail.max_staleness.",
        who="runs that bound how old tokens become, or go deeper than auto",
        evidence="the measured runs with 3 are faster than with 2 where KV is retained",
    )
    num_slots: int | None = _key(
        None,
        "Trajectories generated at the same time over all agent-loop workers, which share them in whole groups of "
        "rollout.n; null: train_batch_size x rollout.n.",
        who="engines with room for more requests than a batch has, or for fewer",
        evidence="docs/design/0010: slots decide how full the engines are",
        ge=1,
    )
    max_attempts: int = _key(
        2,
        "Tries of a prompt whose agent loop raised, before it is dropped and replaced; tail.past_staleness=restart, "
        "which counts its own, needs at least 2.",
        who="tools and rewards that fail now and then",
        evidence="tests with failing agent loops",
        ge=1,
    )
    stream_interval: int = _key(
        32,
        "The engine streams every so many tokens: what an engine death can lose, against the cost per token. "
        "tail.interrupt_mode=keep_kv streams every token.",
        who="runs that trade speed for less lost work",
        evidence="docs/design/0002: what a hand-over costs",
        ge=1,
    )
    events: str | None = _key(
        "auto",
        "Folder of the run's event stream: steps with their metrics, batches, gates, weight updates, segments of "
        "responses, and what the run chose, with the reason. auto: `events` in trainer.default_local_dir; null: no "
        "stream.",
        who="runs whose checkpoints are on a slow network file system: give a local folder",
        evidence="below 1 % of a step, benchmarks/results/bench_events.json",
        min_length=1,
    )
    events_text: int = _key(
        0,
        "Tokens of each request to an engine, its last ones, that the event stream has as text, and characters of its "
        "prompt; by a click the page shows them for a prompt that is not trained yet. 0: the stream has no texts.",
        who="who wants to read a response before it is complete",
        evidence="a need: a response of minutes is looked at while it grows",
        ge=0,
        le=MAX_EVENTS_TEXT,
    )
    restarts: int = _key(
        3,
        "After the death of a process that training cannot go on without, or a new start that fails, the command "
        "starts training again from its last checkpoint, at most so often without a further completed step in between; "
        "with trainer.resume_mode=auto, and when the command has completed a step.",
        who="0: clusters that start the command again by themselves, and whoever wants to look at what is left",
        evidence="tests with killed training ranks, task runners and TransferQueue controllers",
        ge=0,
    )
    save_minutes: Annotated[float, Field(gt=0)] | Literal["auto"] | None = _key(
        AUTO,
        "Minutes between two checkpoints, each at the end of a step. auto: 20 where trainer.save_freq was not set, "
        "else none. The newest one is kept, or as many as trainer.max_actor_ckpt_to_keep says. null: none.",
        who="runs that can afford to lose more or less than 20 minutes",
        evidence="without it a run that sets no trainer.save_freq loses all its steps with one dead training rank",
    )
    rollout_log: bool = _key(
        True,
        "true: responses are written into a log beside the checkpoints, `rollout_log` in trainer.default_local_dir, "
        "until a checkpoint has them. A run that is started again trains the steps since its last checkpoint from the "
        "log instead of generating them again. Without checkpoints, and with tail.policy=reorder, there is no log.",
        who="`false`: disks without room for it, up to 18 bytes a token between two checkpoints",
        evidence="docs/design/0014: what it costs",
    )
    dump_every: int = _key(
        1,
        "Steps between two dumps of the trained rollouts, which verl writes if trainer.rollout_data_dir is set. A dump "
        "has a line for each response: prompt, response, score, and which weight versions sampled how many tokens.",
        who="long runs, whose dumps of every step would fill the disk",
        evidence="verl dumps every step; a step of 32 x 8 responses of 1,300 tokens is about 2 MB",
        ge=1,
    )
    timeouts: TimeoutConfig = TimeoutConfig()
    packing: PackingConfig = PackingConfig()
    tail: TailConfig = TailConfig()
    slots: SlotsConfig = SlotsConfig()
    weights: WeightsConfig = WeightsConfig()

    @model_validator(mode="after")
    def _check(self) -> PartialRolloutConfig:
        """Refuse values that contradict each other."""
        policy, restarts = self.tail.policy, self.tail.past_staleness == "restart"
        unused = f"left out with {BLOCK}.tail.policy={policy}, which decides how many prompts are in flight"
        in_use = policy == "partial" or self.prefetch_factor in (AUTO, PREFETCH_FACTOR)
        _require(in_use, "prefetch_factor", self.prefetch_factor, unused)
        again = f"at least 2 with {BLOCK}.tail.past_staleness=restart; to try prompts once set past_staleness=drop"
        _require(self.max_attempts > 1 or not restarts, "max_attempts", self.max_attempts, again)
        unused = f"false with {BLOCK}.tail.policy={policy}, whose rounds start no more than there are slots for"
        _require(policy == "partial" or not self.slots.are_adaptive, "slots.adaptive", self.slots.adaptive, unused)
        return self

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any]) -> PartialRolloutConfig:
        """Build from a plain mapping (`OmegaConf.to_container`); the same content is parsed once in a process.

        Raises:
            ConfigError: an unknown or retired key, a wrong type or a value out of range.
        """
        plain = _plain(block)
        try:
            return _parsed(json.dumps(plain, sort_keys=True))
        except TypeError:  # json cannot say it, so it is of a wrong type somewhere
            return _parse(plain)

    @classmethod
    def from_rollout(cls, custom: Mapping[str, Any] | None) -> PartialRolloutConfig:
        """The block as engines see it: in verl's `rollout.custom`, under the same name; without it, the defaults.

        Raises:
            ConfigError: as `from_mapping`.
        """
        return cls.from_mapping((custom or {}).get(BLOCK) or {})

    def to_mapping(self) -> dict[str, Any]:
        """A plain mapping, which `from_mapping` reads."""
        return self.model_dump(by_alias=True)

    def capacity(self, train_batch_size: int) -> int:
        """Largest number of prompts in flight for a batch of `train_batch_size` prompts."""
        return groups_in_flight(self.depths[0], train_batch_size)

    @property
    def minutes_between_saves(self) -> float | None:
        """Minutes; None: nothing is saved by time. `auto` that nothing has chosen a value for counts as that."""
        return None if self.save_minutes == AUTO else self.save_minutes

    @property
    def depths(self) -> tuple[float, float]:
        """Batches in flight: to start with, and at most. They differ only with prefetch_factor=auto.

        >>> PartialRolloutConfig().depths, PartialRolloutConfig(prefetch_factor=2.5).depths
        ((2.0, 3.0), (2.5, 2.5))
        """
        if self.prefetch_factor != AUTO:
            return self.prefetch_factor, self.prefetch_factor
        # With engines that generate while the model trains, prompts are admitted one update earlier.
        ahead = 0.0 if self.placement == SEPARATE else 1.0
        bound = math.inf if self.tail.max_staleness is None else self.tail.max_staleness + ahead
        return min(PREFETCH_FACTOR, bound), min(DEEPEST, bound)


def groups_in_flight(depth: float, train_batch_size: int) -> int:
    """Largest number of prompts in flight for so many batches; never below one batch."""
    return max(train_batch_size, int(depth * train_batch_size))


def _plain(block: Mapping[str, Any]) -> dict[str, Any]:
    """A copy made of dicts: verl hands its engines OmegaConf's mappings."""
    return {name: _plain(value) if hasattr(value, "items") else value for name, value in block.items()}


@lru_cache(maxsize=16)
def _parsed(block: str) -> PartialRolloutConfig:
    return _parse(json.loads(block))


def _parse(block: dict[str, Any]) -> PartialRolloutConfig:
    for key, value in _leaves(block):
        refuse_retired(key, value)
    try:
        return PartialRolloutConfig.model_validate(block)
    except ValidationError as error:
        raise _as_config_error(error.errors()[0]) from None


def _leaves(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


def refuse_retired(key: str, value: object = None) -> None:
    """Raise ConfigError with what to use instead for a retired key or value; `key` is written below the block."""
    way_out = RETIRED_KEYS.get(key)
    if way_out:
        raise ConfigError(f"{BLOCK}.{key} was retired in release 0.2: {way_out} (see CHANGELOG.md)")
    way_out = RETIRED_VALUES.get((key, value)) if isinstance(value, str) else None
    if way_out:
        raise ConfigError(f"{BLOCK}.{key}={value} was retired in release 0.2: {way_out} (see CHANGELOG.md)")


def field_keys(model: type[BaseModel] = PartialRolloutConfig, prefix: str = "") -> dict[str, Any]:
    """Every key below the block, dotted, with its described pydantic field; blocks themselves are left out."""
    found: dict[str, Any] = {}
    for name, item in model.model_fields.items():
        key = f"{prefix}{item.alias or name}"
        inner = item.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= field_keys(inner, f"{key}.")
        else:
            found[key] = item
    return found


def unknown_key(key: str) -> ConfigError:
    """The error for a key below the block that does not exist, with the key that was perhaps meant."""
    known, (prefix, _, last) = field_keys(), key.rpartition(".")
    within = f"{prefix}." if prefix else ""
    beside = sorted({name.removeprefix(within).partition(".")[0] for name in known if name.startswith(within)})
    meant = [f"{within}{name}" for name in difflib.get_close_matches(last, beside, 1)]
    meant += [name for name in known if name.rpartition(".")[2] == last]
    meant += difflib.get_close_matches(key, known, 1, CLOSE)
    guess = f": did you mean {BLOCK}.{meant[0]}? Known here" if meant else "; known here"
    return ConfigError(f"unknown key {BLOCK}.{key}{guess}: {', '.join(beside or sorted(known))}")


def _as_config_error(error: ErrorDetails) -> ConfigError:
    """One of pydantic's errors in our words."""
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return raised
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_key(key)
    if key.rpartition(".")[0] in field_keys():  # pydantic names the type of a union that did not fit
        key = key.rpartition(".")[0]
    value, allowed = error["input"], _allowed(key)
    return ConfigError(f"{BLOCK}.{key}={value!r} is not allowed: must be {allowed} (set {BLOCK}.{key}=...)")


def _allowed(key: str) -> str:
    """In words, what a key may be."""
    item = field_keys().get(key)
    if item is None:
        return "a block of keys"
    words, limits = _words(item.annotation), [*item.metadata]
    for part in get_args(item.annotation):
        limits += [limit for described in getattr(part, "__metadata__", ()) for limit in described.metadata]
    words = ["a non-empty string" if word == "a string" and limits else word for word in words]
    said = [
        f"{text} {getattr(limit, name):g}" for limit in limits for name, text in _LIMITS.items() if hasattr(limit, name)
    ]
    return " ".join([" or ".join(words), *said])


def _words(kind: Any) -> list[str]:
    """What a type allows: `auto`, a number, ...; null comes first and a number, which has limits, last."""
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return choices if len(choices) == 1 else [f"one of {', '.join(choices)}"]
    if get_origin(kind) is Annotated:
        return _words(get_args(kind)[0])
    parts = [word for part in get_args(kind) for word in _words(part)]
    return sorted(parts, key=_ORDER.index) if parts else [_KINDS[kind]]


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}
_ORDER = ["null", AUTO, *_KINDS.values()]
_LIMITS = {"ge": "of at least", "gt": "above"}
