"""From a traced loss to its graph, by a few of its layers where layers are alike, else by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.frontends.jax.attention import attention_lifted
from autopar.frontends.jax.aux import single_results
from autopar.frontends.jax.branches import check_loops
from autopar.frontends.jax.calls import constants_whole
from autopar.frontends.jax.constants import Constants, stored
from autopar.frontends.jax.draft import Draft, Operand, Value
from autopar.frontends.jax.errors import CaptureError, ParameterWithoutGradient
from autopar.frontends.jax.few_layers import Asked, Programs, all_layers, few_layers
from autopar.frontends.jax.finish import Stacks, graph_of
from autopar.frontends.jax.fold import folded
from autopar.frontends.jax.idioms import lifted
from autopar.frontends.jax.inputs import paths_of
from autopar.frontends.jax.interpret import flat_parameters
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.left_out import LeftOut, put_back
from autopar.frontends.jax.norms import norms_weighted
from autopar.frontends.jax.own_casts import OwnCasts, own_casts
from autopar.frontends.jax.products import products_named
from autopar.frontends.jax.routed import experts_named
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.sorted_rows import rows_in_place
from autopar.frontends.jax.vocabulary import lookups_lifted
from autopar.nouns.graph import Graph


@dataclass(frozen=True, slots=True)
class Built:
    """stacks:  how the graph names stacked parameters.
    results: what the function returns: numbers, and else results of the graph in their order.
    arrays:  what it closes over and is held, by path.
    casts:   what it asks for in the precision of the workload.
    """

    graph: Graph
    stacks: Stacks
    results: tuple[Operand, ...]
    arrays: Mapping[str, Any]
    casts: OwnCasts


def built(asked: Asked, closed: Any) -> Built:
    """The graph; ``closed``: the jaxpr of what is asked. Raises `CaptureError` and its kinds."""
    few = few_layers(asked, closed)
    made = None if few is None else built_of_few(asked, few)
    if made is not None:
        return made
    every = _built(asked, all_layers(asked, closed))
    assert every is not None
    return every


def built_of_few(asked: Asked, programs: Programs) -> Built | None:
    """None where that is to be told or done for all layers."""
    try:
        return _built(asked, programs)
    except CaptureError:
        return None


def _built(asked: Asked, programs: Programs) -> Built | None:
    """None where layers that were left out have no place to go back to."""
    casts = own_casts(programs.closed, programs.narrow, asked.precision)
    if programs.out and casts.lost:  # told for every layer
        return None
    gone, own = programs.gone, frozenset(programs.paths)
    inputs = _inputs(asked.params, asked.batch)
    constants = Constants(asked.loss, [v.path for v in inputs])
    given = [v for v in inputs if v.role != "parameter" or v.path in own]
    draft = draft_of(programs.closed, given, programs.exact, programs.rules, constants, casts.at)
    left = tuple(v for v in draft.inputs if v.role != "parameter" or v.path not in gone)
    folding = _folded(replace(draft, inputs=left), programs.out)
    if folding is None:
        return None
    graph, stacks, results = _graph(folding, constants)
    return Built(graph, stacks, results, constants.arrays, casts)


def _folded(draft: Draft, out: Sequence[LeftOut]) -> Draft | None:
    for step in (
        simplified,
        lifted,
        norms_weighted,
        attention_lifted,
        products_named,
        lookups_lifted,
        rows_in_place,
        experts_named,
        folded,
    ):
        draft = step(draft)
    for one in out:
        whole = put_back(draft, one)
        if whole is None:
            return None
        draft = whole
    return draft


def _graph(draft: Draft, constants: Constants) -> tuple[Graph, Stacks, tuple[Operand, ...]]:
    """The graph of a folded draft, as `Built` has it."""
    draft, results = single_results(stored(draft, constants))
    graph, stacks = graph_of(draft)
    graph = constants_whole(graph)
    check_loops(graph)
    frozen = flat_parameters(constants.arrays, stacks)
    without = [
        name for name, t in graph.parameters() if not t.differentiable and name not in frozen
    ]
    if without:
        shown = ", ".join(without[:5]) + (", ..." if len(without) > 5 else "")
        raise ParameterWithoutGradient(
            f"the loss does not depend on {len(without)} of {len(list(graph.parameters()))} "
            f"parameters: {shown}. Take them out of the tree, use them in the loss, or pass what "
            "is not trained as a batch entry"
        )
    return graph, stacks, results


def _inputs(params: Any, batch: Mapping[str, Any]) -> tuple[Value, ...]:
    values = [
        Value(tuple(leaf.shape), str(leaf.dtype), "parameter", path)
        for path, leaf in paths_of(params)
    ]
    values += [
        Value(tuple(leaf.shape), str(leaf.dtype), "input", path) for path, leaf in paths_of(batch)
    ]
    seen: set[str] = set()
    for value in values:
        if value.path in seen:
            raise CaptureError(
                f"{value.path!r} names two leaves of parameters and batch: rename one of them"
            )
        seen.add(value.path)
    return tuple(values)
