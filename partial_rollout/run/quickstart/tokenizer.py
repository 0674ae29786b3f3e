"""A character-level tokenizer in Hugging Face format, with the chat tokens verl's Qwen path expects."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNK, TURN_START, TURN_END = "<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, UNK, TURN_START, TURN_END)
PRINTABLE = "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
CHARACTERS = PRINTABLE + "\n"

# verl renders prompts turn by turn and expects a single newline token after every <|im_end|>.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, plus the special tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
