"""Algorithms and models as chains of short whole jobs, and when one counts as run: for `tests.e2e.matrix`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from PIL import Image

from tests.e2e.conftest import is_conserved, with_critic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.e2e.conftest import Job

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
FLOAT32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
REFERENCE = (
    f"{REF}.log_prob_micro_batch_size_per_gpu=32", f"{REF}.fsdp_config.dtype=float32",
    f"{REF}.fsdp_config.use_torch_compile=False", f"{REF}.use_torch_compile=False",
    f"+{REF}.fsdp_config.mixed_precision={FLOAT32}",
)  # fmt: skip
REWARD_MODEL, REWARD_FUNCTION = "reward.reward_model", "reward.custom_reward_function"
READ_IMAGES = ("torchvision==0.28.0", "qwen-vl-utils==0.0.14")
"""The first is the one for the CPU's torch 2.13."""
PIP_S = 600.0
CHAT_WITH_IMAGES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The quickstart's form of a conversation, with content of several parts."""
PLANNER = "partial_rollout.packing.planner=verl"


def _critic(model: str) -> list[str]:
    return with_critic(Path(model).parent)


def _estimator(name: str, *more: str) -> list[str]:
    return [f"algorithm.adv_estimator={name}", *more]


def _reward_model(_: str) -> list[str]:
    block = REWARD_MODEL
    return [
        f"{block}.enable=True", f"{block}.enable_resource_pool=True", f"{block}.n_gpus_per_node=1", f"{block}.nnodes=1",
        f"{block}.rollout.name=vllm", f"{block}.rollout.tensor_model_parallel_size=1",
        f"{block}.rollout.dtype=float32", f"{block}.rollout.free_cache_engine=False",
        f"++{block}.rollout.enable_sleep_mode=False",
        f"{block}.rollout.max_num_seqs=32", f"{block}.rollout.prompt_length=352", f"{block}.rollout.response_length=1",
        f"{REWARD_FUNCTION}.path={Path(__file__).with_name('model_reward.py')}",
        f"{REWARD_FUNCTION}.name=compute_score",
        "ray_kwargs.ray_init.num_gpus=2",
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Jobs on one folder of checkpoints, each with overrides of its own."""

    what: str
    jobs: Callable[[str], Sequence[list[str]]]
    """By the path of the tiny model."""
    write: Callable[[Path, Path, int], list[str]] | None = None
    """Makes further inputs of so many rows, from the task's folder into another one, and returns overrides for them."""
    modules: Callable[[Path], str] | None = None
    """Makes a folder of modules that the environment lacks, and returns what its jobs have in PYTHONPATH."""


def with_torchvision(folder: Path) -> str:
    """What reads images, from PyPI, and what lets torchvision load beside the CPU's torch."""
    options = ["--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *READ_IMAGES], check=True, timeout=PIP_S)
    return os.pathsep.join([str(folder), str(Path(__file__).with_name("torchvision_on_a_cpu"))])


def write_images(task: Path, folder: Path, num_rows: int) -> list[str]:
    """A tiny Qwen2.5-VL with the task's words, and rows with an image each."""
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, model = AutoTokenizer.from_pretrained(task / "model"), folder / "vl"
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.chat_template = CHAT_WITH_IMAGES
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(marks)), strict=True))
    # vLLM's attention on a CPU wants heads of 32 at least.
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 256}
    text: dict[str, Any] = {**heads, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    text |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text["rope_scaling"] = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 784, "max_pixels": 1568}
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (model / "preprocessor_config.json").write_text(json.dumps(sizes | kinds))
    file = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(file, "PNG")
    frame = pd.read_parquet(task / "train.parquet").head(num_rows)
    frame["images"] = [[{"bytes": file.getvalue()}] for _ in range(len(frame))]
    frame["prompt"] = [[{**words, "content": f"<image>{words['content']}"} for words in row] for row in frame["prompt"]]
    frame.to_parquet(folder / "images.parquet")
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder / 'images.parquet'}",
        "data.max_prompt_length=64",  # an image is four tokens at least
    ]


def write_reward_model(task: Path, folder: Path, _: int) -> list[str]:
    """A classifier with one label, which verl asks for a response's score."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    path = folder / "reward"
    config = Qwen3Config.from_pretrained(task / "model", num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(path)
    return [f"{REWARD_MODEL}.model_path={path}", f"+{REWARD_FUNCTION}.reward_kwargs.model={path}"]


def _twice(overrides: Callable[[str], list[str]]) -> Callable[[str], list[list[str]]]:
    return lambda model: [overrides(model)] * 2


CASES = {
    "gae": Case("GAE with a critic", _twice(_critic)),
    "rloo": Case("RLOO", _twice(lambda _: _estimator("rloo"))),
    "reinforce_plus_plus": Case(
        "REINFORCE++ with KL to a reference model in the reward",
        _twice(lambda _: _estimator("reinforce_plus_plus", "algorithm.use_kl_in_reward=True", *REFERENCE)),
    ),
    "opo": Case("OPO", _twice(lambda _: _estimator("opo"))),
    "reference": Case(
        "a reference model with KL in the loss", _twice(lambda _: [f"{ACTOR}.use_kl_loss=True", *REFERENCE])
    ),
    "lora": Case(
        "LoRA", _twice(lambda _: ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"])
    ),
    "reward_model": Case(
        "a reward function that asks a reward model on devices of its own",
        _twice(_reward_model),
        write_reward_model,
    ),
    "megatron": Case(
        "Megatron with planner=verl",
        _twice(lambda _: ["model_engine=megatron", f"{ACTOR}.strategy=megatron", f"~{ACTOR}.fsdp_config", PLANNER]),
    ),
    "images": Case(
        "a vision-language model with rows of text and image", _twice(lambda _: []), write_images, with_torchvision
    ),
}


def what_is_wrong(job: Job, steps: range) -> str:
    """Why a job does not count as run: its error, missing steps, lost prompts, or no interruption; empty if it does."""
    if job.code:
        return last_error(job)
    if [step["training/global_step"] for step in job.steps] != list(steps):
        return f"other steps than {steps.start} to {steps.stop - 1}"
    if not all(is_conserved(step) for step in job.steps):
        return "a prompt was lost"
    found = counts(job.steps)
    return "" if found["interrupted"] and found["resumed"] else "nothing was interrupted and resumed"


def counts(steps: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Steps, interrupted requests, and trained trajectories that were interrupted."""
    names = {"interrupted": "partial_rollout/interrupted", "resumed": "partial_rollout/resumed_trajectories"}
    return {"steps": len(steps)} | {name: int(sum(step[key] for step in steps)) for name, key in names.items()}


def last_error(job: Job) -> str:
    """The driver's own message, or the last line that names an exception."""
    lines = [line.strip() for line in job.output.splitlines()]
    told = [line for line in lines if line.startswith("error: ")]
    # Hydra's line has all overrides, and the error only below it.
    named = [line for line in lines if "Error" in line and not line.startswith("Error executing job")]
    return (told or named or [f"code {job.code}"])[-1][:300]
