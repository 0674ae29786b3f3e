"""Texts for the event stream, of bounded length: the end of a prompt, and the last tokens of a request to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHARACTERS_A_TOKEN = 16
"""Most that a token counts for; the text of a few tokens can be any length."""


class EventTexts:
    """Makes the texts that a worker's events have; all of them are empty if none are wanted.

    >>> class Words:
    ...     def decode(self, ids, **_):
    ...         return " ".join(f"w{each}" for each in ids)
    >>> EventTexts(Words(), num_tokens=2).of_tokens([1, 2, 3])
    ('w2 w3', 2)
    >>> EventTexts(Words(), num_tokens=0).of_tokens([1, 2, 3])
    ('', 0)
    """

    def __init__(self, tokenizer: Any, num_tokens: int) -> None:
        """`num_tokens`: the last ones of a request that are decoded; 0: none."""
        self._tokenizer, self._num = tokenizer, num_tokens

    def of_tokens(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text, and how many tokens it has. Special tokens are in it: they say how a response ended."""
        last = list(token_ids[-self._num :]) if self._num else []
        if not last:
            return "", 0
        try:
            text = self._tokenizer.decode(last, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except (TypeError, ValueError, OverflowError, LookupError):  # a tokenizer of the user's; the response counts
            return "", 0
        return str(text)[-CHARACTERS_A_TOKEN * self._num :], len(last)

    def of_prompt(self, row: Mapping[str, Any]) -> str:
        """The end of the prompt's messages; pictures and the like are left out."""
        if not self._num:
            return ""
        return "\n".join(_text_of(message.get("content")) for message in row.get("raw_prompt", ()))[-self._num :]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
