"""Every error this package raises on purpose, split by who can mend its cause.

PartialRolloutError
├── RunEnded                  no fault: the run is over, so a request was turned away
├── TooStale                  no fault: a trajectory has tokens past the staleness bound and must not go on
├── UserError                 the command line, the data or the installation
│   ├── ConfigError           a value in the configuration: which one, what was given, what is allowed
│   ├── DataError             a prompt, a data file, a checkpoint or a model path
│   ├── PackingError          these samples fit into no micro-batches: there are none, too few, or one is too long
│   ├── AgentLoopBroken       one prompt after the other is dropped; the message has the last reason
│   └── VersionError          an installed package is not the version that this release was built for
├── ClusterError              Ray cannot give, or did not keep, what the run needs
│   ├── ResourcesUnavailable  names each resource that is missing, and how many
│   ├── ActorLost             an actor of this package died, or its main loop ended
│   └── WaitTimeout           a bounded wait ran out; names who waited, for whom and how long
├── EngineError               the inference engine
│   ├── EngineDead            its process is gone, or refuses requests for good
│   ├── DrainTimeout          requests were left in the engine after a drain; names them
│   ├── WeightUpdateError     new weights did not arrive whole; the engine must be relaunched
│   │   ├── WeightPeerLost        the other end of the weight channel died or went silent; names it
│   │   ├── WeightProtocolError   the other end has another version, update or secret, or a message came out of order
│   │   ├── WeightMismatch        a name, shape, dtype or value that the engine's model cannot take; names the tensor
│   │   ├── SharedMemoryFull      no room for the buffers of a weight update in /dev/shm
│   │   └── DeviceMemoryFull      no room for the buffers of a weight update on the GPU
│   └── ResumeStalled         a request was interrupted again and again without progress in between
└── InternalError             a bug in this package; names the object, its state and the event
    ├── IllegalTransition     an event in a state whose transition table has no row for it
    ├── DuplicateUid          a prompt uid was admitted twice
    ├── CapacityExceeded      more prompts would be in flight than the queue's capacity
    └── StaleClaim            a worker reported on a claim that is no longer the prompt's current one

A message says what was given, what is allowed and where to set it. Where a process is gone, the message names its role,
node and pid as far as they are known.
"""


class PartialRolloutError(Exception):
    """Base of all errors raised on purpose by this package."""


class RunEnded(PartialRolloutError):
    """The run is over and the request was turned away: a control-flow signal for agent loops, not a fault."""


class TooStale(PartialRolloutError):
    """A trajectory has tokens past the staleness bound: a control-flow signal for agent loops, not a fault."""


class UserError(PartialRolloutError):
    """The user can mend the cause: configuration, data or installation."""


class ConfigError(UserError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range."""


class DataError(UserError):
    """A prompt, data file, checkpoint or model path cannot be used; drops are counted under the short name `reason`."""

    def __init__(self, message: str, reason: str = "bad_data") -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        """Only the message; the reason travels in `args` so that the error survives pickling."""
        return str(self.args[0])


class PackingError(UserError):
    """These samples, ranks and token budget have no plan of micro-batches; the message has the numbers."""


class AgentLoopBroken(UserError):
    """Prompts are dropped as fast as new ones are admitted: the agent loop or its data fails for all of them."""


class VersionError(UserError):
    """An installed package is not the version this release supports."""


class ClusterError(PartialRolloutError):
    """Ray cannot give, or did not keep, what the run needs."""


class ResourcesUnavailable(ClusterError):
    """The cluster lacks resources; the message says which and how many."""


class ActorLost(ClusterError):
    """An actor of this package died, or its main loop ended while the run goes on."""


class WaitTimeout(ClusterError, TimeoutError):
    """A bounded wait ran out; the message names who waited, for whom and how long."""


class EngineError(PartialRolloutError):
    """The inference engine failed."""


class EngineDead(EngineError):
    """The engine process is gone or refuses requests for good."""


class DrainTimeout(EngineError, TimeoutError):
    """Requests were still in the engine when the time for a drain was over; the message names them."""


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
    """An admission would put more prompts in flight than the queue's capacity allows."""


class StaleClaim(InternalError):
    """A worker reported on a claim that is no longer the prompt's current one; its result must not be used."""
