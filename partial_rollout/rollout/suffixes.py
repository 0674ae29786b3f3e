"""Drafts for a response: what followed its last tokens before, in itself or in other responses to its prompt. Pure.

A draft that is wrong costs time and changes nothing: the engine checks each one against the model
(docs/design/0012-drafts.md).

    begin -> open -extend, draft-> open -end-> kept -begin with the same tokens-> open
                                                 |
                                                 v  tidy: prompts used longest ago, once there are too many tokens
                                               gone
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEAST, MOST = 2, 16
"""Tokens of a suffix: shorter ones say nothing, and longer ones are not told apart."""
PLACES = 8
"""The newest places of a suffix that are looked at."""
KEPT_TEXTS = 24
"""Responses of a prompt that are kept: those of three epochs with groups of eight."""
MOST_TOKENS = 16_000_000
"""All prompts and their kept responses have no more tokens, of 4 bytes each: 64 MB. Tokens of prompts with an open
response take about 200 bytes more each."""
FOLD, FOLDED = 1_000_003, (1 << 61) - 1
"""The number of a prompt's tokens, by which it is looked up, is theirs as digits of a number."""


@dataclass(slots=True, eq=False)
class Text:
    """A prompt, or a response, which begins with the last `MOST` tokens of its prompt."""

    prompt: Prompt
    tokens: array[int]
    is_open: bool = False
    """Whether it is in a row of the batch."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and the responses to it; while one of them is open, where each pair of tokens is."""

    tokens: array[int]
    texts: list[Text] = field(default_factory=list)
    places: defaultdict[tuple[int, int], list[tuple[Text, int]]] = field(default_factory=lambda: defaultdict(list))
    """After a pair of tokens: the text, and where in it the next token is or will be; the newest last."""

    @property
    def is_open(self) -> bool:
        """Whether a response to it is in a row of the batch."""
        return any(text.is_open for text in self.texts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and its responses."""
        return len(self.tokens) + sum(len(text.tokens) for text in self.texts)

    def note_all(self) -> None:
        """Note the places of all its tokens."""
        for text in (Text(self, self.tokens), *self.texts):
            self.note(text, 0)

    def note(self, text: Text, start: int) -> None:
        """Note the places of a text's tokens from `start` on."""
        tokens, places = text.tokens, self.places
        for place in range(max(start, LEAST), len(tokens)):
            found = places[tokens[place - 2], tokens[place - 1]]
            found.append((text, place))
            if len(found) > 2 * PLACES:
                del found[:PLACES]


class Suffixes:
    """The responses that an engine has generated, by prompt, bounded in tokens.

    >>> suffixes = Suffixes(drafts=2)
    >>> first = suffixes.begin([1, 2, 3])
    >>> suffixes.extend(first, [4, 5, 6, 7])
    >>> second = suffixes.begin([1, 2, 3])
    >>> suffixes.extend(second, [4, 5])
    >>> suffixes.draft(second)
    [6, 7]
    """

    def __init__(self, drafts: int, most_tokens: int = MOST_TOKENS) -> None:
        """`drafts` tokens in each draft."""
        self._drafts, self._most_tokens = drafts, most_tokens
        self._prompts: OrderedDict[tuple[int, int], Prompt] = OrderedDict()
        self._lengths: defaultdict[int, int] = defaultdict(int)
        self._ended: list[Prompt] = []
        self.num_tokens = 0
        """Tokens that are kept, those of the prompts included."""

    def begin(self, tokens: Sequence[int]) -> Text:
        """The text of a request that has these tokens: a prompt, or a known one and a response as far as it is."""
        given = array("i", tokens)
        prompt = self._prompt(given)
        if not prompt.places:
            prompt.note_all()
        size = len(prompt.tokens)
        own = given[max(0, size - MOST) :]
        before = [text for text in prompt.texts if not text.is_open and text.tokens == own[: len(text.tokens)]]
        text = max(before, key=lambda each: len(each.tokens), default=None)
        # A text without a response of its own would be taken for the beginning of every other one.
        if text is None or len(text.tokens) == min(size, MOST):
            text = Text(prompt, own[: min(size, MOST)])
            prompt.texts.append(text)
            self.num_tokens += len(text.tokens)
        text.is_open = True
        self.extend(text, own[len(text.tokens) :])
        return text

    def extend(self, text: Text, tokens: Iterable[int]) -> None:
        """Add tokens that the response has got."""
        start = len(text.tokens)
        text.tokens.extend(tokens)
        self.num_tokens += len(text.tokens) - start
        text.prompt.note(text, start)

    def end(self, text: Text) -> None:
        """The text gets no more tokens, for now; others of its prompt may go on to draft from it."""
        text.is_open = False
        self._ended.append(text.prompt)

    def tidy(self) -> None:
        """Keep no places of prompts that are not open, and no more tokens than may be; after the changes of a step."""
        for prompt in self._ended:
            if not prompt.is_open:
                prompt.places.clear()
            self._forget_texts(prompt)
        self._ended.clear()
        while self.num_tokens > self._most_tokens:
            found = next(((key, prompt) for key, prompt in self._prompts.items() if not prompt.is_open), None)
            if found is None:
                return
            key, prompt = found
            del self._prompts[key]
            self._lengths[key[0]] -= 1
            if not self._lengths[key[0]]:
                del self._lengths[key[0]]
            self.num_tokens -= prompt.num_tokens

    def draft(self, text: Text) -> list[int]:
        """What may follow; filled up with the last token, since an engine is fastest where all drafts are as long."""
        found = array("i", text.tokens[-MOST:])
        size = len(found)
        while len(found) < size + self._drafts and (more := self._following(text, found)):
            found.extend(more[: size + self._drafts - len(found)])
        found.extend(found[-1:] * (size + self._drafts - len(found)))
        return found[size:].tolist()

    def _following(self, text: Text, tail: array[int]) -> array[int]:
        """Tokens after the longest suffix of `tail` that is somewhere, the newest of several."""
        best, most = array("i"), 0
        if len(tail) < LEAST:
            return best
        for other, place in reversed(text.prompt.places.get((tail[-2], tail[-1]), ())[-PLACES:]):
            length = _common(other.tokens, place, tail)
            if length > most:
                best, most = other.tokens[place : place + self._drafts], length
            if most == MOST:
                break
        return best

    def _prompt(self, given: array[int]) -> Prompt:
        """The longest known prompt that the tokens begin with, or a new one; used last from now on."""
        numbers = list(accumulate(given, _fold, initial=0))
        keys = ((length, numbers[length]) for length in sorted(self._lengths, reverse=True) if length < len(numbers))
        key = next((each for each in keys if each in self._prompts), (len(given), numbers[-1]))
        if key not in self._prompts:
            self._prompts[key] = Prompt(given)
            self._lengths[len(given)] += 1
            self.num_tokens += len(given)
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def _forget_texts(self, prompt: Prompt) -> None:
        """Forget the oldest texts of a prompt that has too many."""
        ended = [text for text in prompt.texts if not text.is_open]
        for text in ended[: max(0, len(prompt.texts) - KEPT_TEXTS)]:
            prompt.texts.remove(text)
            self.num_tokens -= len(text.tokens)
            del text.tokens[:]  # so that its noted places lead nowhere


def _fold(number: int, token: int) -> int:
    return (number * FOLD + token + 1) % FOLDED


def _common(tokens: array[int], place: int, tail: array[int]) -> int:
    """How many tokens before a place are also the last of `tail`; 0 where nothing is at the place."""
    if place >= len(tokens):
        return 0
    longest = min(place, len(tail), MOST)
    return next((each for each in range(longest) if tokens[place - 1 - each] != tail[-1 - each]), longest)


PRICE = 0.0015
"""Tokens that a step must bring more for each token that is checked in it. With three drafts 8B took 1.05, 1.25 and
2.15 of the time of the same engine's steps without drafts at 16, 64 and 256 requests on an H200, with five 1.21, 1.54
and 2.75 (docs/results/gpu.md)."""
FIRST_TOKENS = 1.3
"""What a step is taken to bring before any was seen: with three drafts enough for 66 requests."""
WINDOW = 1024
"""Checked drafts after which what was seen before counts little."""
PROBE = 256
"""Steps without drafts after which one has them all the same, which costs a few steps in a thousand."""


class DraftGate:
    """Whether drafts are made: while a checked step of so many requests brings more tokens than it costs time.

    >>> gate = DraftGate(drafts=3)
    >>> gate.is_open(64), gate.is_open(256)
    (True, False)
    >>> gate.note(checked=1024, tokens=3 * 1024)
    >>> gate.is_open(256)
    True
    """

    def __init__(self, drafts: int) -> None:
        """`drafts` tokens in each draft; nothing was seen yet."""
        self._price, self.tokens_a_step = PRICE * drafts, FIRST_TOKENS
        self._without = 0

    def is_open(self, requests: int) -> bool:
        """Whether a step of so many requests has drafts; asked once a step."""
        pays = self.tokens_a_step >= 1 + self._price * requests
        self._without = 0 if pays else self._without + 1
        if self._without > PROBE:
            self._without = 0
            return True
        return pays

    def note(self, checked: int, tokens: int) -> None:
        """Count `checked` drafts, which brought so many tokens, those of the model itself included."""
        if checked:
            self.tokens_a_step += min(1.0, checked / WINDOW) * (tokens / checked - self.tokens_a_step)
