"""Prompts as token ids, in the template that Qwen-Image was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def to_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[int, ...]:
    """Token ids of the whole template."""
    return tuple(tokenizer(TEMPLATE.format(prompt))["input_ids"])


def read_prompts(path: str) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        DataError: the file cannot be read or has no prompt.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"data.prompts={path} cannot be read: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DataError(f"data.prompts={path} has no prompt: one a line is expected")
    return prompts
