"""Proof that an algorithm computes its collective, by playing it on sets of contributions.

What a rank has of a chunk is the set of ranks whose contributions it is the sum of, as bits of a
number. A sum of two sets must be of disjoint ones, for no later step takes a contribution away; in
the end every rank must have the set that the collective asks for. That is exact: values never
matter, so what holds for sets holds for all values, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.collectives.algorithm import Algorithm, AlgorithmError, Send, Step

Contents = dict[tuple[int, int], int]
"""(rank, chunk) -> ranks whose contributions it sums, as bits; absent where nothing is there."""


def check(algorithm: Algorithm) -> None:
    """Raises `AlgorithmError` where the algorithm does not compute its collective: the step and the
    send that cannot be, or what a rank lacks in the end."""
    contents = dict(_before(algorithm))
    for number, step in enumerate(algorithm.steps, 1):
        try:
            contents = _played(algorithm, contents, step)
        except AlgorithmError as error:
            raise AlgorithmError(f"step {number} of {algorithm.name}: {error}") from None
    for (rank, chunk), wanted in _after(algorithm):
        has = contents.get((rank, chunk))
        if has != wanted:
            raise AlgorithmError(
                f"{algorithm.name} is no {algorithm.kind}: in the end rank {rank} has of chunk "
                f"{chunk} {_sum(has)}, and should have {_sum(wanted)}"
            )


def _before(algorithm: Algorithm) -> Iterator[tuple[tuple[int, int], int]]:
    for chunk in range(algorithm.chunks):
        for rank in range(algorithm.ranks):
            if algorithm.kind == "all_gather" and rank != algorithm.owner(chunk):
                continue
            if algorithm.kind == "broadcast" and rank != 0:
                continue
            yield (rank, chunk), 1 << rank


def _after(algorithm: Algorithm) -> Iterator[tuple[tuple[int, int], int]]:
    every = (1 << algorithm.ranks) - 1
    for chunk in range(algorithm.chunks):
        if algorithm.kind == "reduce_scatter":
            yield (algorithm.owner(chunk), chunk), every
            continue
        for rank in range(algorithm.ranks):
            match algorithm.kind:
                case "all_reduce":
                    yield (rank, chunk), every
                case "all_gather":
                    yield (rank, chunk), 1 << algorithm.owner(chunk)
                case "broadcast":
                    yield (rank, chunk), 1


def _played(algorithm: Algorithm, before: Contents, step: Step) -> Contents:
    if step.rounds < 1:
        raise AlgorithmError(f"{step.rounds} rounds: a step takes at least one")
    after = dict(before)
    kept: set[tuple[int, int]] = set()
    added: set[tuple[int, int]] = set()
    for send in step.sends:
        arrives = _sent(algorithm, before, send)
        place = (send.destination, send.chunk)
        if place in kept or (not send.reduces and place in added):
            raise AlgorithmError(
                f"{send} and another send of the step decide what rank {send.destination} has"
            )
        if send.reduces:
            added.add(place)
            after[place] = _added(after, place, arrives, send)
        else:
            kept.add(place)
            after[place] = arrives
    return after


def _sent(algorithm: Algorithm, before: Contents, send: Send) -> int:
    ends = {send.source, send.destination}
    if len(ends) < 2 or not ends <= set(range(algorithm.ranks)):
        raise AlgorithmError(f"{send} is not between two of the {algorithm.ranks} ranks")
    if not 0 <= send.chunk < algorithm.chunks:
        raise AlgorithmError(f"{send} is of none of the {algorithm.chunks} chunks")
    arrives = before.get((send.source, send.chunk))
    if arrives is None:
        raise AlgorithmError(f"{send}, and rank {send.source} does not have chunk {send.chunk}")
    return arrives


def _added(contents: Contents, place: tuple[int, int], arrives: int, send: Send) -> int:
    has = contents.get(place)
    if has is None:
        raise AlgorithmError(f"{send} adds to chunk {send.chunk}, which is not there")
    if has & arrives:
        raise AlgorithmError(f"{send} counts twice {_sum(has & arrives)}")
    return has | arrives


def _sum(bits: int | None) -> str:
    if not bits:
        return "nothing"
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"the contribution of rank{'s' if ranks[1:] else ''} {', '.join(ranks)}"
