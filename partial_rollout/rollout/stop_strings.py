"""Finds stop strings in a response that comes in segments, as vLLM finds them in the response to one request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.engine import EngineCoreRequest

TEXT_PARAMETERS = (
    "stop",
    "include_stop_str_in_output",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Sampling parameters that say what the text of a response is, and where the text ends."""


class StopFinder:
    """Turns the tokens of a whole response into text, by vLLM's own detokenizer, and looks for stop strings.

    An engine sees the text of one segment only: it misses a stop string that began in the segment before. And after a
    segment that ends within a character of several bytes, vLLM's text of the next one begins with the whole prompt, so
    that the engine finds stop strings which the response does not have.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], sampling_params: Mapping[str, Any]) -> None:
        """`tokenizer` is the model's; `sampling_params` are those of the whole response."""
        given = {key: sampling_params[key] for key in TEXT_PARAMETERS if sampling_params.get(key) is not None}
        request = SimpleNamespace(
            request_id="",
            prompt_token_ids=prompt_ids,
            prompt_embeds=None,
            sampling_params=SamplingParams(max_tokens=None, **given),
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, cast("EngineCoreRequest", request))

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        """Add tokens; how many of them the response has if a stop string ends among them, else None.

        As in vLLM, the token that completes the stop string belongs to the response, whether the text does or not.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if self._detokenizer.update([token_id], stop_terminated=False) is not None:
                return count
        return None
