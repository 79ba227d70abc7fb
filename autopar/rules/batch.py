"""Which factor of every op holds the batch, so that data axes (and microbatches) split it.

The batch enters with the inputs and is followed from op to op by the rules. On a data axis a tensor
is one of

=======  =========================================================================================
``Sd``   split: dim d holds the batch, as the major factor
``P``    a sum over the batch, each rank has its own part (the loss)
``R``    depends on the batch and is whole on every rank: what became of a sum by all_reduce
free     does not depend on the batch: whole, and where it has a gradient, deferred (``D``) down to
         the parameters it was made from
=======  =========================================================================================

An op that meets the batch gets the batch's factor as its choice. A sum passes through linear ops
(``P``), and as one factor of a product whose others are free (``P0``, ``P1``: a learned weight of
a loss); other ops need it whole (nothing). What is free and added to a sum counts once: on the
first of the ranks, and in equal shares over microbatches. Free ops defer (``D``) where they have
gradients, but one whose result has a batch dim that all readers split (a mask that is expanded over
the batch) makes its own piece: a second pass, from the readers up, finds those.

Gradient accumulation cuts the batch over time, where no collective can reach: it is legal where no
value of one microbatch needs another one. `BatchFlow.obstacles` names what stands against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.sharding import WHOLE, split
from autopar.rules.followed import all_obstacles, named_apart, named_choices, named_states
from autopar.rules.following import Scope
from autopar.rules.pieces import BatchMixed


@dataclass(frozen=True, slots=True)
class BatchFlow:
    """``choices`` by op key: what data axes do; for inputs of blocks by tensor key: a placement.

    ``tensors`` gives every tensor's placement on the data axes (``S0``, ``P``, ``D``, ``R``).
    ``obstacles`` are the reasons against gradient accumulation; none: it is legal. ``pieces``: of
    free inputs of the graph that all readers split along one dim that dim.
    """

    choices: Mapping[str, str]
    tensors: Mapping[str, str]
    obstacles: tuple[str, ...]
    pieces: Mapping[str, int] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    """Keys of tensors whose pieces do not lie one behind the other, see `autopar.rules.pieces`."""
    whole: frozenset[str] = frozenset()
    """Of the inputs that could be cut along sequences, those of which an op needs more than a
    piece: every rank is given all of them."""


def data_choices(graph: Graph, batch_dims: Mapping[str, int]) -> Mapping[str, str]:
    """What data axes do to every op and block input; nothing where the batch cannot be split."""
    return flow_or_obstacle(graph, batch_dims)[0].choices


def flow_or_obstacle(
    graph: Graph, batch_dims: Mapping[str, int]
) -> tuple[BatchFlow, BatchMixed | None]:
    """How the batch runs through the graph; where it cannot be split, nothing is and why."""
    try:
        return batch_flow(graph, batch_dims), None
    except BatchMixed as error:
        return batch_flow(graph, {}), error


def batch_flow(graph: Graph, batch_dims: Mapping[str, int], along_sequences: int = 0) -> BatchFlow:
    """Follows the batch through ``graph`` and the bodies of its blocks.

    ``batch_dims`` gives, for each batched input of the graph, the dim that holds the batch.
    ``along_sequences``: it is the dim of tokens, for as many ranks, and all are equally long. They
    may come to stand behind the samples in one dim (`autopar.rules.pieces`); what does not split
    evenly is whole on every rank, and obstacles mean nothing. Raises `BatchMixed` naming the first
    op that keeps the batch whole, and `UnruledOp`.
    """
    if not along_sequences:
        return _flow(graph, batch_dims)
    whole: frozenset[str] = frozenset()
    while True:
        flow = _flow(graph, batch_dims, whole, along_sequences)
        if flow.whole == whole:
            return flow
        whole = flow.whole


def _flow(
    graph: Graph,
    batch_dims: Mapping[str, int],
    whole: frozenset[str] = frozenset(),
    ways: int = 0,
) -> BatchFlow:
    """``whole``: of ``batch_dims``, inputs that are not cut."""
    batched = bool(batch_dims)
    length = 0
    if ways:
        length = max((graph.tensors[n].shape[dim] for n, dim in batch_dims.items()), default=0)
    scopes = {n: Scope(n, block.body, batched, length, ways) for n, block in graph.blocks.items()}
    top = Scope(None, graph, batched, length, ways)
    for name in graph.inputs:
        dim = batch_dims.get(name)
        top.states[name] = None if dim is None else split(dim)
        if dim is not None and name in whole:
            top.states[name], top.apart[name] = WHOLE, dim
    while True:
        before = {name: dict(scope.entering) for name, scope in scopes.items()}
        top.forward(scopes)
        if before == {name: scope.entering for name, scope in scopes.items()}:
            break
    if batched and any(top.states.get(name) is None for name in graph.outputs[:1]):
        _check_shares([top, *scopes.values()])
    for scope in scopes.values():
        scope.pull(scopes)
    top.pull(scopes)
    every = [top, *scopes.values()]
    return BatchFlow(
        {k: v for scope in every for k, v in named_choices(scope).items()},
        {k: v for scope in every for k, v in named_states(scope).items()},
        tuple(dict.fromkeys(o for scope in every for o in all_obstacles(scope))),
        top.pieces,
        frozenset(k for scope in every for k in named_apart(scope)),
        whole | top.gathered if ways else frozenset(),
    )


def inputs_in_pieces(graph: Graph, batch_dims: Mapping[str, int]) -> Mapping[str, int]:
    """Inputs without a batch dim that all of their readers split along one dim, and that dim; none
    where the batch cannot be split, or an op has no rule."""
    try:
        return batch_flow(graph, batch_dims).pieces
    except UserError:
        return {}


def _check_shares(scopes: Sequence[Scope]) -> None:
    """A loss that is no sum over the batch is divided by the ranks, and so are all gradients."""
    for scope in scopes:
        for op in scope.graph.ops:
            if (
                op.kind != "block"
                and not scope.bound_rule(op).rule.defers
                and scope._has_gradient(op)
            ):
                raise BatchMixed(
                    f"data axes cannot split the batch: op {op.kind!r} at {op.source} has a "
                    "backward that is not linear in the gradient, and the loss does not depend on "
                    "the batch. Compute it for every sample by itself"
                )
