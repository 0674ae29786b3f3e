"""A drafter for vLLM's speculative decoding: tokens that followed the same ones before, in responses to the prompt.

A user names it in the engine's arguments; with and without the flag:

    '+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method: custom_class,
        model: partial_rollout.rollout.drafts.SuffixDrafts, num_speculative_tokens: 3}'

vLLM makes it in the engine's worker process and calls it after each step. It is told the rows of the batch and not
which request is in a row, so it recognises a request by its tokens. When it pays: docs/modes.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from partial_rollout.observability.log import configure_logging
from partial_rollout.rollout.draft_gate import DraftGate
from partial_rollout.rollout.suffixes import Suffixes

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from vllm.config import SpeculativeConfig, VllmConfig

    from partial_rollout.rollout.suffixes import Text

RECOGNISED = 4
"""Tokens by which the request of a row is told from another one."""
TOLD = 4096
"""Steps after which a line in the log says how many of them had drafts, and why the others had none."""
KINDS = DRAFTED, CLOSED, TOO_LARGE = (
    "steps had them",
    "had none since they would cost more time than they save",
    "had none since the step would be larger than the largest CUDA graph",
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Row:
    """A row of the batch: its text, how many tokens the request has, the last of them, and whether it has a draft."""

    text: Text
    length: int
    last: list[int]
    has_draft: bool = False


class SuffixDrafts:
    """A proposer for vLLM's `custom_class`, bounded in memory, and closed while drafts cost more than they bring.

    Its drafts come from this engine's responses to the same prompt: the response itself, its siblings as far as they
    are, and those of earlier epochs. vLLM's `vllm:spec_decode_*` metrics count how many are right.
    """

    def __init__(self, vllm_config: VllmConfig, clock: Callable[[], float] = perf_counter) -> None:
        """In the engine's worker process; `clock` has seconds."""
        configure_logging()
        drafts = cast("SpeculativeConfig", vllm_config.speculative_config).num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len - drafts - 1
        # A step that is larger than the largest CUDA graph runs in pieces, and the gate's price is that of whole ones.
        graphs = vllm_config.compilation_config.cudagraph_capture_sizes
        self._most_rows = max(graphs) // (drafts + 1) if graphs else None
        self._suffixes, self._gate = Suffixes(drafts), DraftGate(drafts)
        self._rows: dict[int, Row] = {}
        self._clock, self._called_s = clock, 0.0
        self._had_drafts = False
        self._steps = dict.fromkeys(KINDS, 0)

    def load_model(self, *_: Any) -> None:
        """The proposer has no model; vLLM's runner for CPUs makes this call on every proposer."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Drafts for each row of the batch.

        `sampled_token_ids` has the tokens that each row has just got (none while it is prefilled), `num_tokens`
        (rows,) how many it has with them, and `token_ids` (rows, longest) all of them. An empty list is no draft.
        """
        before_s, self._called_s = self._called_s, self._clock()
        went_on = self._take_in(sampled_token_ids, num_tokens, token_ids)
        running = [number for number, tokens in enumerate(sampled_token_ids) if tokens]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not running:
            return drafts
        if went_on:
            self._gate.took(len(running), self._called_s - before_s, has_drafts=self._had_drafts)
        kind = self._kind(len(running))
        self._had_drafts = kind == DRAFTED
        for number in running if self._had_drafts else ():
            row = self._rows[number]
            if row.length < self._longest:
                drafts[number], row.has_draft = self._suffixes.draft(row.text), True
        return drafts

    def _kind(self, requests: int) -> str:
        """Whether a step of so many requests has drafts, and why not; counted, and told of every `TOLD` steps."""
        if self._most_rows is not None and requests > self._most_rows:
            kind = TOO_LARGE
        else:
            kind = DRAFTED if self._gate.is_open(requests) else CLOSED
        self._steps[kind] += 1
        if sum(self._steps.values()) == TOLD:
            told = ", ".join(f"{number} {each}" for each, number in self._steps.items())
            brings, takes = self._gate.tokens_a_step, self._gate.price(requests)
            how = "measured" if self._gate.has_measured(requests) else "estimated"
            text = (
                "drafts in %d steps: %s; a step of %d requests with drafts brings each %.2f tokens "
                "and takes %.2f times as long (%s)"
            )
            logger.info(text, TOLD, told, requests, brings, takes, how)
            self._steps = dict.fromkeys(KINDS, 0)
        return kind

    def _take_in(self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray) -> bool:
        """Learn what each row has got, and which have other requests than before; whether none has, or is prefilled."""
        begun, checked, brought = [], 0, 0
        for number in [each for each in self._rows if each >= len(sampled)]:
            self._suffixes.end(self._rows.pop(number).text)
        for number, tokens in enumerate(sampled):
            row = self._rows.get(number)
            if not tokens:  # it is prefilled: the request of the row may be another one than before
                if row and row.last != _last(token_ids[number], row.length):
                    self._suffixes.end(self._rows.pop(number).text)
                continue
            length = int(num_tokens[number])
            before = length - len(tokens)
            if row and row.length == before and row.last == _last(token_ids[number], before):
                checked, brought = checked + row.has_draft, brought + len(tokens) * row.has_draft
                self._suffixes.extend(row.text, tokens)
                self._rows[number] = Row(row.text, length, _last(token_ids[number], length))
                continue
            if row:
                self._suffixes.end(self._rows.pop(number).text)
            begun.append(number)
        # After the ends, so that a text that has moved to another row is free.
        for number in begun:
            length, tokens = int(num_tokens[number]), sampled[number]
            text = self._suffixes.begin(token_ids[number, : length - len(tokens)].tolist())
            self._suffixes.extend(text, tokens)
            self._rows[number] = Row(text, length, _last(token_ids[number], length))
        self._suffixes.tidy()
        self._gate.note(checked, brought)
        return not begun and all(sampled)


def _last(tokens: np.ndarray, length: int) -> list[int]:
    return tokens[max(0, length - RECOGNISED) : length].tolist()
