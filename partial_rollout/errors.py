"""Every error this package raises on purpose, split by whose fault it is.

PartialRolloutError
├── RunEnded                not a fault: a request was turned away because the run is over
├── RunStopped              not a fault: somebody has asked for the end of the run
├── TooStale                not a fault: a trajectory has tokens past the staleness bound and must not go on
├── UserError               the command line, the data or the installation: say what was given and what is allowed
│   ├── ConfigError         a value in the composed configuration
│   │   └── Refusal             one that a run cannot have: what was given, because, instead
│   ├── DataError           a prompt, a data file or a model path
│   ├── PackingError        no micro-batches can be made of these samples: none, too few, too long
│   ├── CallOverdue         a tool or a reward has not answered in time: an attempt of its prompt has failed
│   ├── ScoringFailed       a response was the end of several reward workers
│   ├── AgentLoopBroken     one prompt after the other is dropped; the message has the last reason
│   └── VersionError        an installed package this release was not built for
├── ClusterError            Ray cannot give or keep what the run needs
│   ├── ResourcesUnavailable
│   ├── ActorLost           an actor of ours died or its main loop ended
│   │   ├── TaskRunnerLost      the one in which training runs
│   │   └── RayProcessLost      Ray's GCS or raylet, which the command had started
│   ├── JournalUnreadable   the prompt manager cannot go on where its process died; names the file
│   └── WaitTimeout         a bounded wait ran out; names who waited, for whom, since when
├── EngineError             the inference engine
│   ├── EngineDead
│   ├── EnginesLost         engines could not be brought back, or die too often: training is started again
│   ├── DrainTimeout        requests survived a drain; names them
│   ├── WeightUpdateError   new weights did not arrive whole; the engine must be relaunched
│   │   ├── WeightPeerLost      the other end of the weight channel died or went silent
│   │   ├── WeightProtocolError version, update, secret or order of messages
│   │   ├── WeightMismatch      a name, shape, dtype or value the engine's model cannot take; names the tensor
│   │   ├── SharedMemoryFull    no room for the update's buffers in /dev/shm
│   │   └── DeviceMemoryFull    no room for the update's buffers on the GPU
│   └── ResumeStalled       a trajectory was interrupted twice without a token or an opening of the gate in between
└── InternalError           a bug of ours; names object, state and event
    ├── IllegalTransition
    ├── DuplicateUid
    ├── CapacityExceeded    more prompts were admitted than the prefetch cap allows
    └── StaleClaim          a worker reported on a claim that is no longer its own
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partial_rollout.types import Death


class PartialRolloutError(Exception):
    """Base of all errors raised on purpose by this package."""


class RunEnded(PartialRolloutError):
    """The run is over and the request was turned away: a control-flow signal for agent loops, not a fault."""


class RunStopped(PartialRolloutError):
    """Somebody has asked for the end of the run, by SIGTERM or Ctrl-C: a control-flow signal, not a fault."""


class TooStale(PartialRolloutError):
    """A trajectory has tokens past the staleness bound: a control-flow signal for agent loops, not a fault."""


class UserError(PartialRolloutError):
    """The user can fix it: configuration, data or installation."""


class ConfigError(UserError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range."""


class Refusal(ConfigError):
    """A value that a run cannot have; the message says all of it, and its parts say it one by one."""

    def __init__(self, message: str, given: str = "", because: str = "", instead: str = "") -> None:
        super().__init__(message)
        self.given, self.because, self.instead = given or message, because, instead


class DataError(UserError):
    """A data file, model path or prompt cannot be used; `reason` is the short name it is counted under."""

    def __init__(self, message: str, reason: str = "bad_data") -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        """Only the message; the reason travels in `args` so that the error survives pickling."""
        return str(self.args[0])


class PackingError(UserError):
    """No plan exists, or none was found, for these samples, ranks and token budget; the message has the numbers."""


class CallOverdue(UserError):
    """A trajectory has waited too long for a tool or its reward: an attempt of its prompt has failed."""


class ScoringFailed(UserError):
    """Reward workers died one after the other with the same response: an attempt of its prompt has failed."""


class AgentLoopBroken(UserError):
    """More prompts were dropped during the wait for one batch than fresh prompts could make up for."""


class VersionError(UserError):
    """An installed package is not the version this release supports."""


class ClusterError(PartialRolloutError):
    """Ray cannot give, or did not keep, what the run needs."""


class ResourcesUnavailable(ClusterError):
    """The cluster lacks resources; the message says which and how many."""


class ActorLost(ClusterError):
    """An actor of ours died, or a loop that must not end did."""


class TaskRunnerLost(ActorLost):
    """The task runner died, in which training runs."""

    def __init__(self, death: Death) -> None:
        super().__init__(str(death))
        self.death = death


class RayProcessLost(ActorLost):
    """A process of Ray itself died, its GCS or a raylet; no process of the run can go on without it."""


class JournalUnreadable(ClusterError):
    """The prompt manager's journal is gone or damaged, so its queue cannot be made again."""


class WaitTimeout(ClusterError, TimeoutError):
    """A bounded wait ran out; the message names who waited, for whom and how long."""


class TransferQueueSilent(WaitTimeout):
    """TransferQueue did not answer in time, whether its processes are frozen or hang."""


class EngineError(PartialRolloutError):
    """The inference engine failed."""


class EngineDead(EngineError):
    """The engine process is gone or refuses requests for good.

    Where nobody starts it again in this run, training is started again as after the death of any other process.
    """


class EnginesLost(EngineError):
    """Engines have died and could not be brought back, or die again and again; the message names them.

    The run cannot go on without them, so training is started again as after the death of any other process.
    """


class DrainTimeout(EngineError, TimeoutError):
    """Requests were still in the engine when the drain deadline passed; the message names them."""


class ResumeStalled(EngineError):
    """A request came back interrupted again without progress and without the gate having moved."""


class WeightUpdateError(EngineError):
    """New weights did not arrive whole; what the engine holds is undefined, so it must be relaunched."""


class WeightPeerLost(WeightUpdateError, TimeoutError):
    """The other end of the weight channel died, or was silent for longer than allowed; the message names it."""


class WeightProtocolError(WeightUpdateError):
    """The other end has another version, update or secret, or sent a message out of order."""


class WeightMismatch(WeightUpdateError):
    """A tensor's name, shape, dtype or value does not fit the engine's model; the message names the tensor."""


class SharedMemoryFull(WeightUpdateError):
    """/dev/shm has no room for the buffers of a weight update."""


class DeviceMemoryFull(WeightUpdateError):
    """The GPU has no room for the buffers of a weight update."""


class InternalError(PartialRolloutError):
    """A bug in this package."""


class IllegalTransition(InternalError):
    """An event arrived in a state whose transition table has no row for it."""


class DuplicateUid(InternalError):
    """A prompt uid was admitted twice."""


class CapacityExceeded(InternalError):
    """An admission would put more prompts in flight than the queue's capacity."""


class StaleClaim(InternalError):
    """The claim is not the prompt's current one, so its result must not be used."""
