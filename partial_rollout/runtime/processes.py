"""The processes of a run: who notices that one has died, within how long, and what is done about it.

`docs/troubleshooting.md` shows the same table to users; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Then(Enum):
    """What a run does when a process has died."""

    GOES_ON = "goes on"
    """The process is started again, or others do its work; training does not restart."""
    STARTS_AGAIN = "starts again"
    """Training ends with an error that names the process, and the command starts it again from the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One row: a kind of process."""

    role: str
    noticed_by: str
    within_s: float
    """Seconds from the death to the moment at which somebody knows; measured on two cores beside other jobs."""
    then: Then
    lost: str
    """What has to be computed again."""


WATCH = "the prompt manager, in which a call to the process is parked that fails when the process dies"
STEP = "the steps since the last checkpoint are trained again, from logged responses"

TRANSFER_QUEUE_CONTROLLER = Kind("TransferQueue controller", WATCH, 5.0, Then.STARTS_AGAIN, STEP)
TRANSFER_QUEUE_STORAGE = Kind("TransferQueue storage", WATCH, 5.0, Then.STARTS_AGAIN, STEP)
TRAINING_RANK = Kind("training rank", WATCH, 5.0, Then.STARTS_AGAIN, STEP)
AGENT_LOOP_WORKER = Kind("agent-loop worker", WATCH, 5.0, Then.GOES_ON, "the tokens of its unfinished responses")
REWARD_WORKER = Kind("reward worker", WATCH, 5.0, Then.GOES_ON, "the scoring of the responses that it had")
ENGINE = Kind(
    "engine",
    "its server: the requests in it fail, or generate nothing for `timeouts.stall_s`",
    5.0,
    Then.GOES_ON,
    "up to `stream_interval` tokens of each request in it",
)
ENGINE_SERVER = Kind(
    "engine server", WATCH, 5.0, Then.GOES_ON, "the tokens of each request in it since its last interruption"
)
LOAD_BALANCER = Kind("load balancer", WATCH, 5.0, Then.GOES_ON, "which engine has a trajectory's context")
PROMPT_MANAGER = Kind(
    "prompt manager",
    "Ray, which starts it again; the task runner, which waits for news from it",
    5.0,
    Then.GOES_ON,
    "nothing",
)
TASK_RUNNER = Kind("task runner", "the driver, which waits for its end", 5.0, Then.STARTS_AGAIN, STEP)
WITNESS = Kind("witness", "Ray, which starts it again", 5.0, Then.GOES_ON, "nothing")

KINDS = (
    AGENT_LOOP_WORKER,
    REWARD_WORKER,
    ENGINE,
    ENGINE_SERVER,
    LOAD_BALANCER,
    PROMPT_MANAGER,
    TRANSFER_QUEUE_CONTROLLER,
    TRANSFER_QUEUE_STORAGE,
    TRAINING_RANK,
    TASK_RUNNER,
    WITNESS,
)
