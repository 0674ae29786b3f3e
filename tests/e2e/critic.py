"""A value model for a machine without FlashAttention, which verl's loader of value models always asks for.

It lies beside a checkpoint, from where `from_pretrained` reads it with `trust_remote_code`.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen3ForTokenClassification


class CriticWithoutFlashAttention(Qwen3ForTokenClassification):
    """The quickstart's model with a value head."""

    def get_correct_attn_implementation(self, *_: Any, **__: Any) -> str:
        """Torch's own attention, whatever was asked for."""
        return "sdpa"
