"""Whether `SuffixDrafts` gets to draft: it makes no drafts in a step that is larger than the largest CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.settings.block import BLOCK
from partial_rollout.settings.derived import ENGINE_ARGUMENTS, engine_option, num_engines, read_settings
from partial_rollout.settings.flag import ROLLOUT, SPECULATION

if TYPE_CHECKING:
    from omegaconf import DictConfig

SUFFIX_DRAFTS = "partial_rollout.rollout.drafts.SuffixDrafts"
GRAPHS_KEY, BATCHED = f"{ROLLOUT}.cudagraph_capture_sizes", "max_num_batched_tokens"
DEFAULT_GRAPH, ITS_OWNER = 512, "vLLM's default, with which GPUs of compute capability 10 have 1024"
"""Tokens of the largest graph that vLLM 0.24 and 0.28 capture where nobody says a size.

Their rule is the least of this number, of 2 (drafts + 1) max_num_seqs, which drafts never exceed, and of
max_num_batched_tokens. The one GPU with another number (in 0.28) is not known before the start, so the text names it.
"""


def seldom_drafts(config: DictConfig) -> str:
    """What to say where each engine's share of the slots at the start is more than it drafts for; else empty.

    Nothing is said where the largest graph is not known.

    Raises:
        ConfigError: as `read_settings`, and as `Settings.slot_bounds`.
    """
    if (step := _checked_step(config)) is None:
        return ""
    (width, largest, whose), settings = step, read_settings(config)
    running, num_drafts = _in_an_engine(config, settings.num_slots), width - 1
    if width * running <= largest:
        return ""
    needed, (key, batched) = width * running, engine_option(config, BATCHED)
    remedy = f"let the largest value of {GRAPHS_KEY} be at least {needed}"
    if settings.block.slots.adaptive is not False:
        most = _in_an_engine(config, settings.slot_bounds.most)
        if most > running:
            remedy += f" ({width * most} with {BLOCK}.slots.adaptive=true, which may let it run {most})"
    if batched is not None and needed > batched:
        remedy += f" and {key}, above which there is no graph, too"
    return (
        f"an engine drafts only while it runs at most {largest // width} requests, because its largest CUDA graph has "
        f"{largest} tokens ({whose}) and a request with {num_drafts} drafts takes {width}. The slots let it run "
        f"{running}: it drafts seldom or never, and each step takes longer than in an engine without drafts; {remedy}, "
        f"or leave out {SPECULATION} (docs/modes.md#drafts-from-earlier-responses)"
    )


def ended_by_more_slots(config: DictConfig) -> int:
    """Requests that an engine drafts for at most, if it starts with no more and adaptive slots could be more; else 0.

    Raises:
        ConfigError: as `seldom_drafts`.
    """
    if (step := _checked_step(config)) is None:
        return 0
    (width, largest, _), settings = step, read_settings(config)
    drafted = largest // width
    is_between = _in_an_engine(config, settings.num_slots) <= drafted < _in_an_engine(config, settings.slot_bounds.most)
    return drafted if is_between else 0


def _checked_step(config: DictConfig) -> tuple[int, int, str] | None:
    """Tokens of a request in a checked step of `SuffixDrafts`, those of the largest graph, and who says so.

    None: the engine has another drafter or none, or as `_largest_graph`.
    """
    num_drafts = OmegaConf.select(config, f"{SPECULATION}.num_speculative_tokens")
    if OmegaConf.select(config, f"{SPECULATION}.model") != SUFFIX_DRAFTS or not isinstance(num_drafts, int):
        return None
    graph = _largest_graph(config)
    return None if graph is None else (num_drafts + 1, *graph)


def _largest_graph(config: DictConfig) -> tuple[int, str] | None:
    """Tokens of an engine's largest graph, and who says so; None: there are no graphs, or nothing tells the sizes."""
    options: Any = OmegaConf.select(config, f"{ENGINE_ARGUMENTS}.compilation_config") or {}
    key, batched = engine_option(config, BATCHED)
    if engine_option(config, "enforce_eager")[1] or isinstance(options, str) or options.get("cudagraph_mode") == "NONE":
        return None
    # verl writes its own key over the one of vLLM's options.
    sizes = engine_option(config, "cudagraph_capture_sizes")[1] or options.get("cudagraph_capture_sizes")
    if sizes:
        return max((size for size in sizes if batched is None or size <= batched), default=0), "the largest that is set"
    if "max_cudagraph_capture_size" in options or engine_option(config, "max_cudagraph_capture_size")[1]:
        return None
    if batched is not None and batched < DEFAULT_GRAPH:
        return batched, f"{key}={batched}"
    return DEFAULT_GRAPH, ITS_OWNER


def _in_an_engine(config: DictConfig, slots: int) -> int:
    """Requests that an engine runs at once, of so many for all engines."""
    share, most = -(-slots // num_engines(config)), engine_option(config, "max_num_seqs")[1]
    return share if most is None else min(share, most)
