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
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

LEAST, MOST = 2, 16
"""Tokens of a suffix: shorter ones say nothing, and longer ones are not told apart."""
PLACES = 8
"""The newest places of a suffix that are looked at."""
KEPT_TEXTS = 24
"""Responses of a prompt that are kept: those of three epochs with groups of eight."""
KEPT_GROUPS = 3
"""Times as many responses of a prompt are kept, if that is more, as were in the batch at once: those of three epochs
with larger groups. Less than a group would not do, since an interruption takes all of it out, and it comes back."""
MOST_TOKENS = 16_000_000
"""All prompts and their kept responses have no more tokens, of 4 bytes each: 64 MB."""
MOST_NOTED = 2_000_000
"""Tokens whose places are noted, of up to 140 bytes each: beyond them prompts that are not open lose their places, and
noting them again takes 0.5 microseconds a token. No prompt does in the step in which a response to it ends, and
`FORGOTTEN` at most for each response that ends: after an interruption not all rows come back in the same step."""
FORGOTTEN = 2
"""One more than the prompt that a response may have brought: with one, prompts that get longer were noted without end
where each response has a prompt of its own, as in conversations whose earlier thinking the chat template drops."""
DIGEST_BYTES = 16
"""A prompt is looked up by a digest of its tokens, so long that no two prompts have the same one."""
BLOCK = 64
"""A request is compared with known prompts whose whole blocks of so many tokens are those that it begins with. Else it
would be compared with prompts of all lengths, of which conversations of many turns have thousands."""
NEXT_TEXT = 1 << 32
"""A place is one integer, since the garbage collector visits no integers: the number of its text times this, and where
in the text the next token is."""
NOWHERE = -1
"""No place."""


@dataclass(slots=True, eq=False)
class Text:
    """A prompt, or a response, which begins with the last `MOST` tokens of its prompt."""

    prompt: Prompt
    tokens: array[int]
    is_open: bool = False
    """Whether it is in a row of the batch."""
    number: int | None = None
    """In `noted` of its prompt, once a place in it is noted."""
    before: array[int] = field(default_factory=lambda: array("q"))
    """By where a noted place is in it: the place that the same pair of tokens had before, or `NOWHERE`."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and the responses to it, and while they are needed the places of each pair of tokens."""

    key: bytes
    """Digest of its tokens."""
    blocks: bytes
    """Digest of its whole blocks."""
    tokens: array[int]
    texts: list[Text] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """After a pair of tokens: its newest place."""
    noted: list[Text] = field(default_factory=list)
    """Texts with noted places, by number; forgotten ones and the prompt itself included."""
    num_noted: int = 0
    """Tokens whose places are noted, those of forgotten texts included."""
    most_open: int = 0
    """Most responses that were in the batch at once."""

    @property
    def is_open(self) -> bool:
        """Whether a response to it is in a row of the batch."""
        return any(text.is_open for text in self.texts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and its responses."""
        return len(self.tokens) + sum(len(text.tokens) for text in self.texts)

    def note_all(self) -> None:
        """Note the places of all its tokens, and of no others."""
        self.forget_places()
        for text in (Text(self, self.tokens), *self.texts):
            self.note(text, 0)

    def note(self, text: Text, start: int) -> None:
        """Note the places of a text's tokens from `start` on."""
        first, places, before = max(start, LEAST), self.places, text.before
        if text.number is None:
            text.number = len(self.noted)
            self.noted.append(text)
            before.extend([NOWHERE] * first)  # the head of a response is noted with the prompt
        tokens = text.tokens[first - LEAST :]
        for place, (last, token) in enumerate(zip(tokens, tokens[1:-1], strict=False), text.number * NEXT_TEXT + first):
            pair = last << 32 | token
            before.append(places.get(pair, NOWHERE))
            places[pair] = place
        self.num_noted += len(text.tokens) - start

    def noted_places(self, pair: tuple[int, int]) -> Iterator[tuple[Text, int]]:
        """The newest `PLACES` places after a pair of tokens, the newest first: the text, and where in it."""
        place = self.places.get(pair[0] << 32 | pair[1], NOWHERE)
        for _ in range(PLACES):
            if place == NOWHERE:
                return
            text, where = self.noted[place // NEXT_TEXT], place % NEXT_TEXT
            yield text, where
            place = text.before[where]

    def forget_places(self) -> None:
        """Note nothing."""
        for text in self.noted:
            text.number = None
            del text.before[:]
        self.noted.clear()
        self.places.clear()
        self.num_noted = 0

    @property
    def head(self) -> array[int]:
        """What a response to it begins with."""
        return self.tokens[-MOST:]

    def own(self, given: array[int]) -> array[int]:
        """The part of a request's tokens that is its text: the head, and the response as far as it is."""
        return given[len(self.tokens) - len(self.head) :]

    def begun(self, own: array[int]) -> list[Text]:
        """The responses that begin with these tokens, or these tokens with them."""
        texts = (text for text in self.texts if len(text.tokens) > len(self.head))
        return [text for text in texts if text.tokens[: len(own)] == own[: len(text.tokens)]]

    def beginning(self, own: array[int]) -> Text | None:
        """The longest response that these tokens begin with, of those that are in no row of the batch."""
        found = (text for text in self.begun(own) if not text.is_open and len(text.tokens) <= len(own))
        return max(found, key=lambda text: len(text.tokens), default=None)


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

    def __init__(self, drafts: int, most_tokens: int = MOST_TOKENS, most_noted: int = MOST_NOTED) -> None:
        """`drafts` tokens are proposed at a time."""
        self._drafts, self._most_tokens, self._most_noted = drafts, most_tokens, most_noted
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()
        self._lengths: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        self._noted: OrderedDict[bytes, Prompt] = OrderedDict()
        self._ended: list[Prompt] = []
        self.num_tokens = 0
        """Tokens that are kept, those of the prompts included."""

    def begin(self, tokens: Sequence[int]) -> Text:
        """The text of a request that has these tokens: a prompt, or a known one and a response as far as it is."""
        given = array("i", tokens)
        prompt = self._known(given)
        own = prompt.own(given)
        if not prompt.places or prompt.num_noted > 2 * prompt.num_tokens:
            prompt.note_all()
        for prompts in (self._prompts, self._noted):
            prompts[prompt.key] = prompt
            prompts.move_to_end(prompt.key)
        text = prompt.beginning(own)
        if text is None:
            text = Text(prompt, prompt.head)
            prompt.texts.append(text)
            self.num_tokens += len(text.tokens)
        text.is_open = True
        prompt.most_open = max(prompt.most_open, sum(each.is_open for each in prompt.texts))
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
        """Keep no more tokens and no more places than may be; after the changes of a step."""
        ended = dict.fromkeys(self._ended)
        for prompt in ended:
            self._forget_texts(prompt)
        num_noted = sum(prompt.num_noted for prompt in self._noted.values()) if ended else 0
        for _ in range(FORGOTTEN * len(self._ended)):
            if num_noted <= self._most_noted or not (prompt := _first_idle(self._noted, ended)):
                break
            num_noted -= prompt.num_noted
            prompt.forget_places()
            del self._noted[prompt.key]
        self._ended.clear()
        while self.num_tokens > self._most_tokens and (prompt := _first_idle(self._prompts)):
            self._forget(prompt)

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
        for other, place in text.prompt.noted_places((tail[-2], tail[-1])):
            length = _common(other.tokens, place, tail)
            if length > most:
                best, most = other.tokens[place : place + self._drafts], length
            if most == MOST:
                break
        return best

    def _known(self, given: array[int]) -> Prompt:
        """The prompt of a request.

        A request that goes on with no known response is a prompt of its own, whatever it begins with.
        """
        raw, size, digest, found = given.tobytes(), given.itemsize, blake2b(digest_size=DIGEST_BYTES), list[Prompt]()
        for start in range(0, len(given) + 1, BLOCK):
            if start:
                digest.update(raw[size * (start - BLOCK) : size * start])
            for length in sorted(self._lengths.get(digest.digest(), ())):
                whole = digest.copy()
                whole.update(raw[size * start : size * length])
                if length <= len(given) and (prompt := self._prompts.get(whole.digest())):
                    found.append(prompt)
        for prompt in reversed(found):
            if len(prompt.tokens) == len(given) or prompt.begun(prompt.own(given)):
                return prompt
        blocks = digest.digest()
        digest.update(raw[size * (len(given) // BLOCK * BLOCK) :])
        self._lengths[blocks][len(given)] += 1
        self.num_tokens += len(given)
        return Prompt(digest.digest(), blocks, given)

    def _forget(self, prompt: Prompt) -> None:
        del self._prompts[prompt.key]
        self._noted.pop(prompt.key, None)
        lengths, length = self._lengths[prompt.blocks], len(prompt.tokens)
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[prompt.blocks]
        self.num_tokens -= prompt.num_tokens
        # A prompt whose texts know it would stay in memory until a full collection.
        prompt.forget_places()
        prompt.texts.clear()

    def _forget_texts(self, prompt: Prompt) -> None:
        """Forget the oldest texts of a prompt that has too many."""
        ended = [text for text in prompt.texts if not text.is_open]
        kept = max(KEPT_TEXTS, KEPT_GROUPS * prompt.most_open)
        for text in ended[: max(0, len(prompt.texts) - kept)]:
            prompt.texts.remove(text)
            self.num_tokens -= len(text.tokens)
            del text.tokens[:]  # noted places in it then lead nowhere


def _first_idle(prompts: OrderedDict[bytes, Prompt], but: Container[Prompt] = ()) -> Prompt | None:
    """The prompt that was used longest ago, of those that are not open; none of `but`."""
    return next((prompt for prompt in prompts.values() if not prompt.is_open and prompt not in but), None)


def _common(tokens: array[int], place: int, tail: array[int]) -> int:
    """How many tokens before a place are also the last of `tail`; 0 where nothing is at the place."""
    if place >= len(tokens):
        return 0
    longest = min(place, len(tail), MOST)
    return next((each for each in range(longest) if tokens[place - 1 - each] != tail[-1 - each]), longest)
