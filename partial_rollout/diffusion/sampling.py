"""Requests for images: what one asks for, which ones a server accepts, and when an interrupted one is stuck. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from partial_rollout.diffusion.sde_window import NO_WINDOW, SdeWindow
from partial_rollout.errors import DataError, ResumeStalled

NO_CFG = 1.0
"""Guidance scale at which the negative prompt has no weight."""
REFUSED = "refused_request"
MAX_FRUITLESS = 2
"""Interruptions after one opening of the gate, or without a step, that are not yet a fault.

Two drains may follow each other closely.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One image to generate."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt in its template."""
    seed: int
    """Seed of the request's own noise: the same seed and weights give the same image."""
    height: int
    width: int
    num_steps: int
    negative_ids: tuple[int, ...] | None = None
    true_cfg_scale: float = NO_CFG
    window: SdeWindow = NO_WINDOW
    noise_level: float = 0.0
    sde_type: str = "sde"
    snapshot: bytes | None = None
    """State of the sample from which to go on; None starts from noise."""

    def resumed_from(self, snapshot: bytes | None) -> SampleRequest:
        """A copy of this request that goes on from `snapshot`."""
        return dataclasses.replace(self, snapshot=snapshot)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The answer to a request that was interrupted before its image was finished."""

    snapshot: bytes | None
    """From where to go on; None if the request had not begun."""
    step_index: int
    """Denoise steps that the snapshot contains."""
    openings: int
    """Number of the gate's openings when the request entered."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What all requests of one server must comply with, so that any of them can share a batch."""

    sizes: tuple[tuple[int, int], ...]
    """(height, width) of the images."""
    multiple: int
    """Heights and widths must be multiples of this: the VAE's factor times the transformer's patch."""
    max_steps: int

    def check(self, request: SampleRequest) -> None:
        """Raise DataError for a request that would fail in the engine, and make the requests in its batch fail too."""
        name, size = f"request {request.request_id!r}", (request.height, request.width)
        if size not in self.sizes:
            allowed = ", ".join(f"{height}x{width}" for height, width in self.sizes)
            raise DataError(
                f"{name}: size {size[0]}x{size[1]} is not allowed: rollout.height and width here are {allowed}", REFUSED
            )
        if request.height % self.multiple or request.width % self.multiple:
            raise DataError(
                f"{name}: size {size[0]}x{size[1]} is not allowed: must be multiples of {self.multiple}", REFUSED
            )
        if not 1 <= request.num_steps <= self.max_steps:
            raise DataError(
                f"{name}: num_steps={request.num_steps} is not allowed: must be 1 to {self.max_steps}", REFUSED
            )
        if not request.prompt_ids:
            raise DataError(f"{name}: the prompt has no tokens", REFUSED)
        if (request.negative_ids is not None) != (request.true_cfg_scale > NO_CFG):
            given = "a" if request.negative_ids is not None else "no"
            raise DataError(
                f"{name}: true_cfg_scale={request.true_cfg_scale} with {given} negative prompt mixes guided and "
                f"unguided requests in one batch: give a negative prompt and a scale above {NO_CFG:g}, or neither",
                REFUSED,
            )
        _check_window(name, request)


def _check_window(name: str, request: SampleRequest) -> None:
    last = request.num_steps - (request.sde_type == "cps")
    if len(request.window) and request.window.stop > last:
        why = "the last step of cps adds no noise" if request.window.stop == request.num_steps else "it ends earlier"
        raise DataError(
            f"{name}: SDE window [{request.window.start}, {request.window.stop}) must stop at step {last} of "
            f"{request.num_steps} with sde_type={request.sde_type}: {why}",
            REFUSED,
        )


class Progress:
    """Tells a request that makes progress between its interruptions from one that is stuck."""

    def __init__(self, request_id: str) -> None:
        """Begin without interruptions."""
        self._request_id = request_id
        self._last: Interrupted | None = None
        self._fruitless = 0
        self.interruptions = 0

    def interrupted(self, outcome: Interrupted) -> None:
        """Note an interruption.

        Raises:
            ResumeStalled: it is one too many of those that neither a step nor an opening of the gate lay before.
        """
        last, self._last = self._last, outcome
        self.interruptions += 1
        moved = last is None or outcome.step_index > last.step_index or outcome.openings > last.openings
        self._fruitless = 0 if moved else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS:
            raise ResumeStalled(
                f"request {self._request_id!r} was interrupted {self.interruptions} times and is still at step "
                f"{outcome.step_index} after opening {outcome.openings} of the gate"
            )
