"""Drafts for a response: what followed its last tokens before, in itself or in other responses to its prompt. Pure.

A draft that is wrong costs time and changes nothing: the engine checks each one against the model
(docs/design/0012-drafts.md).

    begin -> open -extend, draft-> open -end-> kept -begin with the same tokens-> open
                                                 |
                                                 v  prompts used longest ago, once there are too many tokens
                                               gone
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
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
"""Of all prompts and their kept responses, 4 bytes each: 64 MB. Those of open prompts take about 200 more each."""


@dataclass(slots=True, eq=False)
class Text:
    """A prompt, or a response, which begins with the last `MOST` tokens of its prompt."""

    prompt: Prompt
    tokens: array[int]
    num_open: int = 0
    """Rows of the batch that it is in; two while the engine moves it from one to the other."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and the responses to it; while one of them is open, where each pair of tokens is."""

    tokens: array[int]
    texts: list[Text] = field(default_factory=list)
    places: defaultdict[tuple[int, int], list[tuple[Text, int]]] = field(default_factory=lambda: defaultdict(list))
    """After a pair of tokens: the text, and where in it the next token is or will be; the newest last."""

    @property
    def num_open(self) -> int:
        """Rows of the batch that have a response to it."""
        return sum(text.num_open for text in self.texts)

    @property
    def num_tokens(self) -> int:
        """Of itself and its responses."""
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
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()
        self._lengths: defaultdict[int, int] = defaultdict(int)
        self.num_tokens = 0
        """That are kept, those of the prompts included."""

    def begin(self, tokens: Sequence[int]) -> Text:
        """The text of a request that has these tokens: a prompt, or a known one and a response as far as it is."""
        given = array("i", tokens)
        prompt = self._find(given.tobytes()) or self._new(given)
        self._prompts.move_to_end(prompt.tokens.tobytes())
        if not prompt.num_open:
            prompt.note_all()
        size = len(prompt.tokens)
        own = given[max(0, size - MOST) :]
        text = next((each for each in reversed(prompt.texts) if each.tokens == own[: len(each.tokens)]), None)
        # A text without a response of its own would be taken for the beginning of every other one.
        if text is None or len(text.tokens) == min(size, MOST):
            text = Text(prompt, own[: min(size, MOST)])
            prompt.texts.append(text)
            self.num_tokens += len(text.tokens)
        text.num_open += 1
        self.extend(text, own[len(text.tokens) :])
        self._forget(prompt)
        return text

    def extend(self, text: Text, tokens: Iterable[int]) -> None:
        """Add tokens that the response has got."""
        start = len(text.tokens)
        text.tokens.extend(tokens)
        self.num_tokens += len(text.tokens) - start
        text.prompt.note(text, start)

    def end(self, text: Text) -> None:
        """A row of the batch has it no more; others of its prompt may go on to draft from it."""
        text.num_open -= 1
        if not text.prompt.num_open:
            text.prompt.places.clear()
            self._forget(text.prompt)

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

    def _find(self, given: bytes) -> Prompt | None:
        """The longest known prompt that the tokens begin with."""
        size = array("i").itemsize
        known = (given[: size * each] for each in sorted(self._lengths, reverse=True) if size * each <= len(given))
        return next((self._prompts[key] for key in known if key in self._prompts), None)

    def _new(self, given: array[int]) -> Prompt:
        prompt = self._prompts[given.tobytes()] = Prompt(given)
        self._lengths[len(given)] += 1
        self.num_tokens += len(given)
        return prompt

    def _forget(self, begun: Prompt) -> None:
        """Forget the oldest texts of a prompt, and prompts that were used longest ago."""
        if len(begun.texts) > KEPT_TEXTS:
            ended = [text for text in begun.texts if not text.num_open]
            for text in ended[: len(begun.texts) - KEPT_TEXTS]:
                begun.texts.remove(text)
                self.num_tokens -= len(text.tokens)
                del text.tokens[:]  # so that its noted places lead nowhere
        while self.num_tokens > self._most_tokens:
            prompt = next((prompt for prompt in self._prompts.values() if not prompt.num_open), None)
            if prompt is None:
                return
            del self._prompts[prompt.tokens.tobytes()]
            self._lengths[len(prompt.tokens)] -= 1
            if not self._lengths[len(prompt.tokens)]:
                del self._lengths[len(prompt.tokens)]
            self.num_tokens -= prompt.num_tokens


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

    def is_open(self, requests: int) -> bool:
        """Whether a step of so many requests has drafts."""
        return self.tokens_a_step >= 1 + self._price * requests

    def note(self, checked: int, tokens: int) -> None:
        """So many drafts were checked, and brought so many tokens, those of the model itself included."""
        if checked:
            self.tokens_a_step += min(1.0, checked / WINDOW) * (tokens / checked - self.tokens_a_step)
