"""Requests for the cache simulator: read from a trace, or drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

BLOCK_SIZE = 512
"""Tokens of a block. Two prompts whose block ids agree up to some block agree in all tokens up to its end."""


@dataclass(frozen=True)
class Request:
    """A prompt of `num_tokens` tokens: all of each of `blocks` but the last, of which it may have a part."""

    num_tokens: int
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_tokens <= 0 or len(self.blocks) != -(-self.num_tokens // BLOCK_SIZE):
            raise ValueError(f"{self.num_tokens} tokens do not fill {len(self.blocks)} blocks of {BLOCK_SIZE}")

    @property
    def reusable(self) -> tuple[int, ...]:
        """The blocks that end before the last token, which always runs."""
        return self.blocks[: (self.num_tokens - 1) // BLOCK_SIZE]


def read_trace(path: Path) -> list[Request]:
    """A trace as JSON lines with `input_length` and `hash_ids`, an id for each block of 512 tokens, in file order.

    Ids are numbered anew in the order in which they appear. Raises `ValueError` for a line that does not fit.
    """
    numbers: dict[int, int] = {}
    requests = []
    for place, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            entry = json.loads(line)
            blocks = tuple(numbers.setdefault(block, len(numbers)) for block in entry["hash_ids"])
            requests.append(Request(entry["input_length"], blocks))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {place} of {path.name} is no request: {error}") from error
    return requests


class _Draw:
    """A random source that also hands out block ids, each once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = count()

    def blocks(self, low: int, high: int) -> list[int]:
        return [next(self._ids) for _ in range(self.random.randint(low, high))]

    def request(self, blocks: Iterable[int]) -> Request:
        """A prompt of these blocks and part of one more."""
        last = self.random.randint(1, BLOCK_SIZE - 1)
        whole = (*blocks, next(self._ids))
        return Request(BLOCK_SIZE * (len(whole) - 1) + last, whole)


def chat(draw: _Draw, num_live: int = 300) -> Iterator[list[int]]:
    """Conversations of five short turns on average, `num_live` of them at a time, under one system prompt."""
    system = draw.blocks(2, 2)
    live: list[list[int]] = []
    while True:
        if len(live) < num_live:
            live.append(system + draw.blocks(1, 4))
            place = len(live) - 1
        else:
            place = draw.random.randrange(len(live))
            live[place] = live[place] + draw.blocks(1, 2)
        yield live[place]
        if draw.random.random() < 0.2:
            live.pop(place)


def shared_prompts(draw: _Draw) -> Iterator[list[int]]:
    """Fifty long system prompts, some used far more often than others, each time with a tail that never returns."""
    prompts = [draw.blocks(8, 8) for _ in range(50)]
    while True:
        place = min(int(draw.random.expovariate(3 / len(prompts))), len(prompts) - 1)
        yield prompts[place] + draw.blocks(1, 8)


def agents(draw: _Draw) -> Iterator[list[int]]:
    """Sixty agents whose long chains grow by steps, the lately active ones faster, and at times go back and fork."""
    tools = draw.blocks(4, 4)
    live: list[tuple[list[int], list[int]]] = []
    while True:
        while len(live) < 60:
            live.append((tools + draw.blocks(6, 12), []))
        chain, ends = live.pop(min(int(draw.random.expovariate(1 / 20)), len(live) - 1))
        if ends and draw.random.random() < 0.1:
            chain = chain[: draw.random.choice(ends)]
        yield chain
        if draw.random.random() > 0.02:
            ends = [end for end in ends if end < len(chain)] + [len(chain)]
            live.insert(0, (chain + draw.blocks(1, 3), ends))


def scan(draw: _Draw) -> Iterator[list[int]]:
    """Half of the requests are long prompts that never return, the other half is `chat`."""
    kept = chat(draw, num_live=100)
    while True:
        yield draw.blocks(4, 60) if draw.random.random() < 0.5 else next(kept)


def documents(draw: _Draw) -> Iterator[list[int]]:
    """Questions about 2,000 documents, the popular ones by Zipf's law."""
    library = [draw.blocks(4, 60) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(library) + 1)]
    while True:
        yield draw.random.choices(library, weights)[0] + draw.blocks(1, 1)


def repeats(draw: _Draw) -> Iterator[list[int]]:
    """The same 3,000 prompts again and again, the popular ones more often."""
    prompts = [draw.blocks(2, 30) for _ in range(3000)]
    weights = [rank**-0.9 for rank in range(1, len(prompts) + 1)]
    while True:
        yield draw.random.choices(prompts, weights)[0]


SYNTHETIC: dict[str, Callable[[_Draw], Iterator[list[int]]]] = {
    each.__name__: each for each in (chat, shared_prompts, agents, scan, documents, repeats)
}


def synthetic(name: str, num_requests: int = 6000, seed: int = 0) -> list[Request]:
    """The first requests of a workload of `SYNTHETIC`."""
    draw = _Draw(seed)
    prompts = SYNTHETIC[name](draw)
    return [draw.request(next(prompts)) for _ in range(num_requests)]
