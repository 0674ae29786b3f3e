"""Stop strings over segments, against vLLM's own detokenizer on the whole response, with a tokenizer of bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from partial_rollout.core.interrupt import REPREFILLED, Context
from partial_rollout.core.resume import ABORTED, STOPPED, ResumableGeneration, Segment
from partial_rollout.rollout.stop_strings import StopFinder

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = "die Straße heißt 你好, été. 🙂 END"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: most characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator([TEXT, "END END ENDE"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = make_tokenizer()
IDS: list[int] = TOKENIZER.encode(TEXT)
PROMPT: list[int] = TOKENIZER.encode("END 你好")
"""With stop strings in it."""


def vllm_stops_after(prompt: list[int], tokens: Sequence[int], params: dict[str, Any]) -> int | None:
    """Where one request to vLLM would stop."""
    request: Any = SimpleNamespace(
        request_id="r", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=SamplingParams(**params)
    )
    detokenizer = IncrementalDetokenizer.from_new_request(TOKENIZER, request)
    for count, token in enumerate(tokens, start=1):
        if detokenizer.update([token], stop_terminated=False) is not None:
            return count
    return None


@given(
    stream=st.lists(st.one_of(st.sampled_from(IDS), st.integers(0, len(TOKENIZER) - 1)), min_size=1, max_size=40),
    known=st.booleans(),
    stop=st.lists(st.sampled_from(["END", "好", "ß", "你好", "🙂 E", "t", ", é", "\ufffd"]), min_size=1, max_size=2),
    min_tokens=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 6), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_a_response_in_segments_stops_where_vllm_stops_one_request(
    stream: list[int], known: bool, stop: list[str], min_tokens: int, cuts: list[int]
) -> None:
    """Each segment is a request of its own, for which vLLM takes prompt and tokens so far as the prompt."""
    stream = IDS if known else stream
    params = {"stop": stop, "min_tokens": min(min_tokens, len(stream)), "max_tokens": len(stream)}
    expected = stream[: vllm_stops_after(PROMPT, stream, params)]
    generation = ResumableGeneration(PROMPT, len(stream), min_tokens=params["min_tokens"])
    generation.make_finder = lambda: StopFinder(TOKENIZER, PROMPT, params)
    opening = 0
    while not generation.finished:
        cut = cuts[opening] if opening < len(cuts) else len(stream) + 1
        request = generation.next_request()
        rest = stream[len(generation.token_ids) :]
        of_segment = params | {"min_tokens": request.min_tokens, "max_tokens": request.max_tokens}
        found = vllm_stops_after(request.prompt_ids, rest, of_segment)
        end, reason, text = min((found or len(rest), STOPPED, "it" if found else None), (cut, ABORTED, None))
        context = Context(0, REPREFILLED)
        generation.add(Segment(rest[:end], None, reason, 0, opening, context, text))
        opening += 1
    assert generation.token_ids == expected


def test_a_character_that_spans_two_segments_is_found() -> None:
    ids = TOKENIZER.encode("🙂")
    assert len(ids) > 1
    finder = StopFinder(TOKENIZER, PROMPT, {"stop": "🙂"})
    assert finder(ids[:-1]) is None
    assert finder([ids[-1], *IDS]) == 1


def test_parameters_of_sampling_are_no_concern_of_it() -> None:
    finder = StopFinder(TOKENIZER, PROMPT, {"stop": ["END"], "max_new_tokens": 7, "logprobs": True, "temperature": 0.0})
    assert finder(IDS) == len(IDS)
