"""Algorithms made for given links, or a proof that there is none: SCCL's model in CP-SAT.

An instance asks for an all-gather of C chunks a rank in S steps of R rounds together (Cai et al.
2021, section 3.4, constraints C1 to C6). Unknown are for each chunk, link and step whether it is
sent, and the rounds of each step:

    arrives   a chunk comes to each rank but its owner exactly once, in one of the S steps
    causes    a rank sends what has come to it in an earlier step, or is its own
    carries   the chunks of a step on the links of a limit <= units * rounds of the step
    rounds    each step has at least one, all together at most R

What distances and cuts refute is not asked of the solver (`autopar.collectives.bounds`). A chunk
that comes to a rank k links away from its owner comes in step k or later, so many unknowns
are not there. A reduce-scatter is the inverse of an all-gather on the links reversed, and each is
one, so a proof holds for it too. An all-reduce is made of both: 2 S steps and 2 R rounds, and what
is refuted is an all-reduce of that form alone. A broadcast has one owner, and C chunks in all.

Where a topology names symmetries, one unknown stands for all sends that these make of one, which is
as small a model as that of one owner (TACCL's symmetry sketches, Shah et al. 2023, section 5.2);
only if it has no solution, all algorithms are looked through.

The budget counts the solver's own deterministic units, so the same instance has the same answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.collectives.algorithm import (
    Algorithm,
    AlgorithmError,
    Kind,
    Send,
    Step,
    inverse,
    then,
)
from autopar.collectives.bounds import least_rounds, least_steps
from autopar.collectives.check import check
from autopar.collectives.topology import Limit, Link, Topology, fits

MOST_RANKS = 16
"""What is synthesised; more ranks are a product of smaller groups."""
BUDGET = 60.0
"""Deterministic units of the solver, each about a second."""
NAME = "synthesised"
Status = Literal["solved", "refuted", "open"]
Sent = tuple[int, Link, int]
"""(chunk, link, step from 1)"""
Solved = tuple[list[Sent], list[int]]
"""What is sent, and the rounds of each step."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What is asked for. chunks: of each rank's piece, SCCL's C; of a broadcast all.

    steps, rounds: of one half of an all-reduce, which has twice as many.
    """

    chunks: int
    steps: int
    rounds: int

    def __str__(self) -> str:
        return f"({self.chunks},{self.steps},{self.rounds})"


@dataclass(frozen=True, slots=True)
class Answer:
    """``refuted``: there is none, proven; ``open``: the budget ended first."""

    status: Status
    algorithm: Algorithm | None = None


def synthesise(
    topology: Topology, instance: Instance, kind: Kind = "all_gather", budget: float = BUDGET
) -> Answer:
    """An algorithm that is proven and fits the links, or that there is none.

    budget: deterministic units that the solver may take for each half. Raises `AlgorithmError` for
    more than `MOST_RANKS` ranks, or fewer than one chunk, step or round.
    """
    if topology.ranks > MOST_RANKS or min(instance.chunks, instance.steps, instance.rounds) < 1:
        raise AlgorithmError(
            f"{kind} of {topology.ranks} ranks in {instance} chunks, steps and rounds: at most "
            f"{MOST_RANKS} ranks are synthesised, of at least one chunk, step and round"
        )
    match kind:
        case "all_gather" | "broadcast":
            answer = _spread(topology, instance, kind, budget)
        case "reduce_scatter":
            answer = _scattered(topology, instance, budget)
        case "all_reduce":
            answer = _reduced(topology, instance, budget)
    if answer.algorithm is not None:  # the solver is believed only as far as it is proven
        check(answer.algorithm)
        fits(answer.algorithm, topology)
    return answer


def _scattered(topology: Topology, instance: Instance, budget: float) -> Answer:
    answer = _spread(topology.reversed(), instance, "all_gather", budget)
    if answer.algorithm is None:
        return answer
    return replace(answer, algorithm=inverse(answer.algorithm))


def _reduced(topology: Topology, instance: Instance, budget: float) -> Answer:
    gather = _spread(topology, instance, "all_gather", budget)
    if gather.algorithm is None:
        return gather
    backward = inverse(gather.algorithm)
    try:
        fits(backward, topology)
    except AlgorithmError:  # links that carry less the other way round, or are not there
        scatter = _scattered(topology, instance, budget)
        if scatter.algorithm is None:
            return scatter
        backward = scatter.algorithm
    return replace(gather, algorithm=then(backward, gather.algorithm))


def _spread(topology: Topology, instance: Instance, kind: Kind, budget: float) -> Answer:
    """An algorithm that copies: each chunk from its owner to all others."""
    ranks = topology.ranks
    chunks = instance.chunks * (ranks if kind == "all_gather" else 1)
    owners = [chunk // instance.chunks if kind == "all_gather" else 0 for chunk in range(chunks)]
    if instance.steps < least_steps(topology, kind):
        return Answer("refuted")
    if instance.rounds < instance.chunks * least_rounds(topology, kind):
        return Answer("refuted")
    if kind == "broadcast":
        topology = replace(topology, symmetries=())  # rank 0 stays where it is
    solved: Solved | Literal["refuted", "open"] = "open"
    if topology.symmetries:
        solved = _solve(topology, owners, instance, budget / 4)
    if isinstance(solved, str):  # of all algorithms, not of symmetric ones alone
        solved = _solve(replace(topology, symmetries=()), owners, instance, budget)
    if isinstance(solved, str):
        return Answer(solved)
    sends, rounds = solved
    steps = [
        Step(tuple(Send(c, *link) for c, link, at in sends if at == number), took)
        for number, took in enumerate(rounds, 1)
    ]
    made = Algorithm(NAME, kind, ranks, chunks, tuple(step for step in steps if step.sends))
    return Answer("solved", made)


def _solve(
    topology: Topology, owners: list[int], instance: Instance, budget: float
) -> Solved | Literal["refuted", "open"]:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    steps = range(1, instance.steps + 1)
    most = instance.rounds - instance.steps + 1
    if most < 1:
        return "refuted"
    rounds = {step: model.new_int_var(1, most, f"rounds {step}") for step in steps}
    model.add(sum(rounds.values()) <= instance.rounds)
    sent = _unknowns(model, topology, owners, instance.steps)
    _arrives_once(model, topology, owners, sent)
    _from_who_has(model, owners, sent)
    _within_limits(model, topology.limits, rounds, sent)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = budget
    match solver.solve(model):
        case cp_model.OPTIMAL | cp_model.FEASIBLE:
            chosen = [key for key, unknown in sent.items() if solver.value(unknown)]
            return chosen, [solver.value(rounds[step]) for step in steps]
        case cp_model.INFEASIBLE:
            return "refuted"
    return "open"


def _unknowns(model: Any, topology: Topology, owners: list[int], steps: int) -> Mapping[Sent, Any]:
    sent: dict[Sent, Any] = {}
    for chunk, owner in enumerate(owners):
        for link in topology.links:
            source, destination = link
            if destination != owner:
                first = topology.distances[owner][source] + 1
                for step in range(first, steps + 1):
                    name = f"{chunk}:{source}>{destination} in {step}"
                    sent[chunk, link, step] = model.new_bool_var(name)
    return _shared(sent, topology, owners)


def _shared(sent: dict[Sent, Any], topology: Topology, owners: list[int]) -> Mapping[Sent, Any]:
    """One unknown for all sends that the symmetries make of one; a chunk moves with its owner."""
    width = owners.count(owners[0])
    seen: set[Sent] = set()
    for first in list(sent) if topology.symmetries else ():
        waiting = [first] if first not in seen else []
        while waiting:
            chunk, (a, b), step = key = waiting.pop()
            if key not in seen:
                seen.add(key)
                sent[key] = sent[first]
                waiting += [
                    (new[owners[chunk]] * width + chunk % width, (new[a], new[b]), step)
                    for new in topology.symmetries
                ]
    return sent


def _arrives_once(
    model: Any, topology: Topology, owners: list[int], sent: Mapping[Sent, Any]
) -> None:
    coming: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for (chunk, (_, destination), _), unknown in sent.items():
        coming[chunk, destination].append(unknown)
    for chunk, owner in enumerate(owners):
        for rank in range(topology.ranks):
            if rank != owner:
                model.add_exactly_one(coming[chunk, rank])


def _from_who_has(model: Any, owners: list[int], sent: Mapping[Sent, Any]) -> None:
    """A send wants one of the sends that brought the chunk earlier."""
    coming: dict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
    for (chunk, (_, destination), step), unknown in sent.items():
        coming[chunk, destination].append((step, unknown))
    for (chunk, (source, _), step), unknown in sent.items():
        if source != owners[chunk]:
            earlier = [other for at, other in coming[chunk, source] if at < step]
            model.add_bool_or([*earlier, ~unknown])


def _within_limits(
    model: Any, limits: Iterable[Limit], rounds: Mapping[int, Any], sent: Mapping[Sent, Any]
) -> None:
    on: dict[tuple[Link, int], list[Any]] = defaultdict(list)
    for (_, link, step), unknown in sent.items():
        on[link, step].append(unknown)
    for limit in limits:
        for step, took in rounds.items():
            together = [unknown for link in limit.links for unknown in on[link, step]]
            model.add(sum(together) <= limit.units * took)
