"""An algorithm of a collective: steps of sends, as records and as text.

    ring all_reduce of 2 ranks in 2 chunks
    1: 1:0+1 0:1+0
    1: 1:1>0 0:0>1

A line is a step, with its rounds before the colon. ``7:2>3``: chunk 7 goes from rank 2 to rank 3,
which keeps it as it is; ``7:2+3``: rank 3 adds it to its own. What a step sends is what its ranks
had before the step. Chunks, steps and rounds are SCCL's (Cai et al. 2021, section 3): a round is
the time in which a link of one unit carries one chunk.

The buffer has `chunks` equal chunks on its full-size side: the result of an all-gather, the input
of a reduce-scatter, the tensor of the others. Of a gather and a scatter, rank r's piece is chunks
``r * per_rank`` to ``(r + 1) * per_rank - 1``; a broadcast is from rank 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

from autopar.nouns.errors import UserError

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_SEND = re.compile(r"(\d+):(\d+)([>+])(\d+)")
_HEAD = re.compile(r"(\S+) (\w+) of (\d+) ranks in (\d+) chunks")
_STEP = re.compile(r"(\d+):(.*)")


class AlgorithmError(UserError, ValueError):
    """An algorithm that cannot be read, made, or does not compute its collective."""


class Send(NamedTuple):
    """A chunk that goes from one rank to another in one step."""

    chunk: int
    source: int
    destination: int
    reduces: bool = False
    """Whether the destination adds it to its own instead of keeping it as it is."""

    def __str__(self) -> str:
        return f"{self.chunk}:{self.source}{'+' if self.reduces else '>'}{self.destination}"

    @staticmethod
    def parse(text: str) -> Send:
        """``Send.parse("7:2+3")``. Raises `AlgorithmError`."""
        match = _SEND.fullmatch(text)
        if match is None:
            raise AlgorithmError(
                f"{text!r} is no send: write chunk:source>destination, as in 7:2>3, or 7:2+3 where "
                "the destination adds"
            )
        return Send(int(match[1]), int(match[2]), int(match[4]), match[3] == "+")


@dataclass(frozen=True, slots=True)
class Step:
    """Sends that begin together; the next step begins when all have arrived."""

    sends: tuple[Send, ...]
    rounds: int = 1

    def __str__(self) -> str:
        return " ".join([f"{self.rounds}:", *map(str, self.sends)])


@dataclass(frozen=True, slots=True)
class Algorithm:
    """``name`` is one word; `chunks` divides by `ranks` for a gather or scatter."""

    name: str
    kind: Kind
    ranks: int
    chunks: int
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise AlgorithmError(f"no collective {self.kind!r}; there are {', '.join(KINDS)}")
        if self.ranks < 1 or self.chunks < 1 or not self.name or " " in self.name:
            raise AlgorithmError(
                f"algorithm {self.name!r} of {self.ranks} ranks in {self.chunks} chunks: give a "
                "name of one word, and at least one rank and one chunk"
            )
        if self.kind in ("all_gather", "reduce_scatter") and self.chunks % self.ranks:
            raise AlgorithmError(
                f"{self.kind} of {self.ranks} ranks in {self.chunks} chunks: ranks have pieces of "
                f"as many chunks each, so take a multiple of {self.ranks}"
            )

    @property
    def per_rank(self) -> int:
        """Chunks of one rank's piece, SCCL's C; of others than gather and scatter a share."""
        return self.chunks // self.ranks

    @property
    def rounds(self) -> int:
        """SCCL's R."""
        return sum(step.rounds for step in self.steps)

    def owner(self, chunk: int) -> int:
        """The rank whose piece a chunk is of, in a gather or scatter."""
        return chunk // self.per_rank

    def __str__(self) -> str:
        """What `parse` reads."""
        head = f"{self.name} {self.kind} of {self.ranks} ranks in {self.chunks} chunks"
        return "\n".join([head, *map(str, self.steps)])

    @staticmethod
    def parse(text: str) -> Algorithm:
        """The inverse of ``str``. Raises `AlgorithmError` with the line that cannot be read."""
        head, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
        match = _HEAD.fullmatch(head)
        if match is None:
            raise AlgorithmError(
                f"{head!r} does not begin an algorithm: write NAME KIND of N ranks in N chunks, as "
                "in: ring all_reduce of 4 ranks in 4 chunks"
            )
        steps = tuple(map(_step, lines))
        kind = cast(Kind, match[2])
        return Algorithm(match[1], kind, int(match[3]), int(match[4]), steps)


def _step(line: str) -> Step:
    match = _STEP.fullmatch(line)
    if match is None:
        raise AlgorithmError(f"{line!r} is no step: write ROUNDS: SEND ..., as in 1: 0:0>1 1:1>0")
    return Step(tuple(map(Send.parse, match[2].split())), int(match[1]))


def made_of(steps: Iterable[Iterable[Send]]) -> tuple[Step, ...]:
    """Steps with the rounds that links of one unit each take; those without sends left out."""
    listed = (tuple(sends) for sends in steps)
    return tuple(Step(sends, _rounds(sends)) for sends in listed if sends)


def _rounds(sends: Iterable[Send]) -> int:
    return max(Counter((send.source, send.destination) for send in sends).values())


def inverse(gather: Algorithm, name: str | None = None) -> Algorithm:
    """The reduce-scatter that sends back whatever an all-gather sends, and adds.

    Each chunk of an all-gather spreads along a tree from its owner, so backward the contributions
    run down the same tree (Cai et al. 2021, section 3.5). It wants the links the other way round.
    Raises `AlgorithmError` for another collective.
    """
    if gather.kind != "all_gather":
        raise AlgorithmError(f"{gather.kind} has no inverse: only an all_gather has")
    steps = tuple(
        replace(
            step, sends=tuple(Send(c, there, here, True) for c, here, there, _ in step.sends[::-1])
        )
        for step in gather.steps[::-1]
    )
    return replace(gather, name=name or gather.name, kind="reduce_scatter", steps=steps)


def then(scatter: Algorithm, gather: Algorithm) -> Algorithm:
    """The all-reduce that is a reduce-scatter, then an all-gather of as many chunks.

    Raises `AlgorithmError` where they do not fit each other.
    """
    kinds = (scatter.kind, gather.kind)
    same = (scatter.ranks, scatter.chunks) == (gather.ranks, gather.chunks)
    if kinds != ("reduce_scatter", "all_gather") or not same:
        raise AlgorithmError(
            f"{scatter.kind} of {scatter.ranks} ranks in {scatter.chunks} chunks, then "
            f"{gather.kind} of {gather.ranks} in {gather.chunks}: an all_reduce is a "
            "reduce_scatter and an all_gather of the same ranks and chunks"
        )
    return replace(gather, kind="all_reduce", steps=scatter.steps + gather.steps)


def beside(*parts: Algorithm) -> Algorithm:
    """Several at once, each on its share of the buffer; steps go together by their number, with the
    rounds that links of one unit take.

    Raises `AlgorithmError` where they are of several collectives or of several numbers of ranks.
    """
    first = parts[0]
    if any((part.kind, part.ranks) != (first.kind, first.ranks) for part in parts):
        raise AlgorithmError("only algorithms of one collective and the same ranks run together")
    pieces = first.ranks if first.kind in ("all_gather", "reduce_scatter") else 1
    width = sum(part.chunks for part in parts) // pieces
    steps: list[list[Send]] = [[] for _ in range(max(len(part.steps) for part in parts))]
    before = 0
    for part in parts:
        own = part.chunks // pieces
        for number, step in enumerate(part.steps):
            for send in step.sends:
                piece, place = divmod(send.chunk, own)
                steps[number].append(Send(piece * width + before + place, *send[1:]))
        before += own
    return replace(first, chunks=width * pieces, steps=made_of(steps))
