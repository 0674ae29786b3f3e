"""The processes of a run: who notices that one has died, within how long, and what is done about it.

`docs/troubleshooting.md` shows the same table to users; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NOTICED_S = 10.0
"""The fault suite fails when a death is not known within this time; seen were up to 3 s beside other jobs."""
ENGINE_WORKER_S = 20.0
"""Bound for an engine worker that dies while it generates: vLLM lets the other workers end before its core tells; seen
were 9.5 s. While the model trains, the next weight update finds it, after a twentieth of `timeouts.resume_s`."""
REPLACED_S = 30.0
"""Bound for a death that is told only when the process is there again; seen were up to 6 s."""


class Then(Enum):
    """What a run does when a process has died."""

    GOES_ON = "goes on"
    """The process is started again, or others do its work; training does not restart."""
    STARTS_AGAIN = "starts again"
    """Training ends with an error that names the process, and the command starts it again from the last checkpoint."""
    ENDS = "ends"
    """The command has ended. Typed again, it goes on from the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One row: a kind of process."""

    role: str
    noticed_by: str
    within_s: float | None
    """Longest time from the death until somebody tells of it, as the fault suite asserts it; None: no test does."""
    then: Then
    lost: str
    """What has to be computed again."""


WATCH = "the prompt manager, in which a call to the process is parked that fails when the process dies"
SERVER = "its server, whose requests fail"
OWN_CHILD = "the driver, which has started it"
STEP = (
    "the steps since the last checkpoint are trained again, from logged responses; unfinished responses lose their "
    "tokens since their last interruption"
)
TOKENS = "up to `stream_interval` tokens of each request in it"

TRANSFER_QUEUE_CONTROLLER = Kind("TransferQueue controller", WATCH, NOTICED_S, Then.STARTS_AGAIN, STEP)
TRANSFER_QUEUE_STORAGE = Kind("TransferQueue storage", WATCH, NOTICED_S, Then.STARTS_AGAIN, STEP)
TRAINING_RANK = Kind("training rank", WATCH, NOTICED_S, Then.STARTS_AGAIN, STEP)
LOGGED = "the tokens of its unfinished responses since their last interruption"
AGENT_LOOP_WORKER = Kind("agent-loop worker", WATCH, REPLACED_S, Then.GOES_ON, LOGGED)
REWARD_WORKER = Kind("reward worker", WATCH, REPLACED_S, Then.GOES_ON, "the scoring of the responses that it had")
ENGINE = Kind("engine", SERVER, NOTICED_S, Then.GOES_ON, TOKENS)
ENGINE_WORKER = Kind(
    "engine worker", "its engine, which ends; then the engine's server", ENGINE_WORKER_S, Then.GOES_ON, TOKENS
)
ENGINE_SERVER = Kind(
    "engine server", WATCH, REPLACED_S, Then.GOES_ON, "the tokens of each request in it since its last interruption"
)
ENGINE_PLACE = Kind("place of an engine", WATCH, None, Then.STARTS_AGAIN, STEP)
"""The holder of an engine's device, where engines are on devices of their own: Ray would give the device away."""
LOAD_BALANCER = Kind("load balancer", WATCH, REPLACED_S, Then.GOES_ON, "which engine has a trajectory's context")
PROMPT_MANAGER = Kind(
    "prompt manager", "Ray, and the task runner, whose call fails", REPLACED_S, Then.GOES_ON, "nothing"
)
TASK_RUNNER = Kind("task runner", "the driver, which waits for its end", NOTICED_S, Then.STARTS_AGAIN, STEP)
WITNESS = Kind("witness", "Ray", None, Then.GOES_ON, "nothing")
RAYLET = Kind("raylet", OWN_CHILD, NOTICED_S, Then.STARTS_AGAIN, STEP)
GCS = Kind("GCS", OWN_CHILD, NOTICED_S, Then.STARTS_AGAIN, STEP)
DRIVER = Kind("driver", "nobody", None, Then.ENDS, STEP)
NODE = Kind("node", "whoever notices the processes that ran there", None, Then.STARTS_AGAIN, STEP)

SURVIVED = (
    AGENT_LOOP_WORKER,
    REWARD_WORKER,
    ENGINE,
    ENGINE_WORKER,
    ENGINE_SERVER,
    LOAD_BALANCER,
    PROMPT_MANAGER,
    TRANSFER_QUEUE_CONTROLLER,
    TRANSFER_QUEUE_STORAGE,
    TRAINING_RANK,
    TASK_RUNNER,
    WITNESS,
    RAYLET,
    GCS,
)
"""The command ends with all its steps though one of them dies."""
KINDS = (*SURVIVED, ENGINE_PLACE, DRIVER, NODE)


def table() -> list[str]:
    """Who notices a death, as rows for the documents; kinds that the same process notices share a row."""
    rows: dict[tuple[str, float | None], list[str]] = {}
    for kind in KINDS:
        rows.setdefault((kind.noticed_by, kind.within_s), []).append(kind.role)
    within = {None: "", REPLACED_S: f"{REPLACED_S:g} s, and it is there again"}
    within |= {limit_s: f"{limit_s:g} s" for limit_s in (NOTICED_S, ENGINE_WORKER_S)}
    return [
        "| who dies | who notices | within |",
        "|---|---|---|",
        *(
            f"| {', '.join(roles)} | {noticed_by} | {within[within_s]} |"
            for (noticed_by, within_s), roles in rows.items()
        ),
    ]
