"""Makes a Qwen-Image checkpoint of 2.3 MB with random weights, in diffusers' format.

    python -m partial_rollout.run.tiny_qwen_image.make_checkpoint --out DIR

All parts have the architecture of the real model, so the same code runs them. A 64 x 64 image is 64 packed latent
tokens. The tokenizer is byte-level. With `--layers N` the transformer has the sizes of Qwen-Image's and N of its 60
layers (340 M parameters each, in bf16): for GPUs, to see what the real model costs. The other parts stay tiny.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

VOCABULARY_SIZE = 512
TEXT_WIDTH = 32
LATENT_CHANNELS = 4
TINY_LAYERS, TINY_HEAD = 2, 16
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_checkpoint(folder: Path, seed: int = 0, layers: int = 0) -> None:
    """Write the pipeline to `folder`; on the same kind of device the same seed gives the same weights.

    `layers`: those of Qwen-Image's sizes; 0: the tiny transformer.
    """
    torch.manual_seed(seed)
    pipeline = QwenImagePipeline(
        scheduler=_scheduler(),
        vae=_vae(),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(folder / "tokenizer"),
        transformer=_large_transformer(layers) if layers else _transformer(),
    )
    pipeline.save_pretrained(folder)


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )


def _transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=TINY_LAYERS,
        attention_head_dim=TINY_HEAD,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


def _large_transformer(num_layers: int) -> QwenImageTransformer2DModel:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return QwenImageTransformer2DModel(
                in_channels=4 * LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                num_layers=num_layers,
                joint_attention_dim=TEXT_WIDTH,
            )
        finally:
            torch.set_default_dtype(usual)


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY_SIZE,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _tokenizer(folder: Path) -> Qwen2Tokenizer:
    """Bytes and the three tokens of Qwen's prompt template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Qwen2Tokenizer.from_pretrained(folder)


def main() -> None:
    """Make the checkpoint unless it is there.

    Raises:
        SystemExit: the folder has one with another number of layers.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="of Qwen-Image's sizes; 0: the tiny transformer")
    options = parser.parse_args()
    if not (options.out / "model_index.json").exists():
        make_checkpoint(options.out, options.seed, options.layers)
        return
    config = json.loads((options.out / "transformer/config.json").read_text(encoding="utf-8"))
    found, tiny = config["num_layers"], config["attention_head_dim"] == TINY_HEAD
    if (found, tiny) != (options.layers or TINY_LAYERS, not options.layers):
        raise SystemExit(f"{options.out} has a {'tiny ' * tiny}model of {found} layers: name another --out")


if __name__ == "__main__":
    main()
