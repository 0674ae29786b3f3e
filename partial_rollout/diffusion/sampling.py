"""Requests for images: what one asks for, which ones an engine takes, and when going on makes no progress. Pure."""

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
    """Token ids of the whole prompt template."""
    seed: int
    """Of the request's own generator: the same seed and weights give the same image."""
    height: int
    width: int
    num_steps: int
    negative_ids: tuple[int, ...] | None = None
    true_cfg_scale: float = NO_CFG
    window: SdeWindow = NO_WINDOW
    noise_level: float = 0.0
    sde_type: str = "sde"
    snapshot: bytes | None = None
    """Where to go on; None starts from noise."""

    def resumed_from(self, snapshot: bytes | None) -> SampleRequest:
        """The same request, going on where it was interrupted."""
        return dataclasses.replace(self, snapshot=snapshot)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A request came back before its image was done."""

    snapshot: bytes | None
    """None: it had not begun."""
    step_index: int
    """Denoise steps that were taken and are not lost."""
    openings: int
    """Number of the gate's openings when the request entered."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What the requests of one engine must have, so that any of them can share a batch or wait for the next."""

    sizes: tuple[tuple[int, int], ...]
    """(height, width) of the images."""
    multiple: int
    """Heights and widths are multiples of it: the VAE's factor times the transformer's patch."""
    max_steps: int

    def check(self, request: SampleRequest) -> None:
        """Raise DataError for a request that would fail in the engine, and those that share its batch with it."""
        name, size = f"request {request.request_id!r}", (request.height, request.width)
        if size not in self.sizes:
            allowed = ", ".join(f"{height}x{width}" for height, width in self.sizes)
            raise DataError(f"{name}: size {size[0]}x{size[1]} is unknown here: rollout.sizes has {allowed}", REFUSED)
        if request.height % self.multiple or request.width % self.multiple:
            raise DataError(f"{name}: size {size[0]}x{size[1]} is not a multiple of {self.multiple}", REFUSED)
        if not 1 <= request.num_steps <= self.max_steps:
            raise DataError(f"{name}: num_steps={request.num_steps} must be 1 to {self.max_steps}", REFUSED)
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
    """Tells a request that is interrupted again and again for a reason from one that is stuck."""

    def __init__(self, request_id: str) -> None:
        """Nothing has happened yet."""
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
