"""From a traced loss to its graph, by a few of its layers where layers are alike, else by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.frontends.jax.attention import attention_lifted
from autopar.frontends.jax.aux import single_results
from autopar.frontends.jax.branches import check_loops
from autopar.frontends.jax.calls import apart_whole
from autopar.frontends.jax.constants import Constants, stored
from autopar.frontends.jax.draft import Draft, Operand, Value
from autopar.frontends.jax.errors import CaptureError, ParameterWithoutGradient
from autopar.frontends.jax.few_layers import Asked, Programs, all_layers, few_layers
from autopar.frontends.jax.finish import graph_of
from autopar.frontends.jax.fold import folded
from autopar.frontends.jax.idioms import lifted
from autopar.frontends.jax.inputs import paths_of
from autopar.frontends.jax.interpret import flat_parameters
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.left_out import LeftOut, put_back
from autopar.frontends.jax.norms import norms_weighted
from autopar.frontends.jax.own_casts import OwnCasts, own_casts
from autopar.frontends.jax.products import products_named
from autopar.frontends.jax.remarks import NAMED
from autopar.frontends.jax.routed import experts_named
from autopar.frontends.jax.shared_stacks import Stacks, written_out
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.sorted_rows import rows_in_place
from autopar.frontends.jax.vocabulary import lookups_lifted
from autopar.nouns.errors import first_of
from autopar.nouns.graph import Graph


@dataclass(frozen=True, slots=True)
class Built:
    """stacks:  how the graph names stacked parameters.
    results: what the function returns: numbers, and else results of the graph in their order.
    arrays:  what it closes over and is held, by path.
    casts:   what it asks for in the precision of the workload.
    untrained: parameters that it gives no gradient, which is zeros then.
    """

    graph: Graph
    stacks: Stacks
    results: tuple[Operand, ...]
    arrays: Mapping[str, Any]
    casts: OwnCasts
    untrained: tuple[str, ...]


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
    draft = draft_of(programs.closed, given, programs.exact, programs.rules, constants, casts)
    left = tuple(v for v in draft.inputs if v.role != "parameter" or v.path not in gone)
    draft, shared = written_out(_lifted(replace(draft, inputs=left)))
    folding = _folded(draft, programs.out)
    if folding is None:
        return None
    graph, stacks, results, untrained = _graph(folding, constants, shared)
    return Built(graph, stacks, results, constants.arrays, casts, untrained)


def _lifted(draft: Draft) -> Draft:
    for step in (
        simplified,
        lifted,
        norms_weighted,
        attention_lifted,
        products_named,
        lookups_lifted,
        rows_in_place,
        experts_named,
    ):
        draft = step(draft)
    return draft


def _folded(draft: Draft, out: Sequence[LeftOut]) -> Draft | None:
    draft = folded(draft)
    for one in out:
        whole = put_back(draft, one)
        if whole is None:
            return None
        draft = whole
    return draft


def _graph(
    draft: Draft, constants: Constants, shared: Stacks
) -> tuple[Graph, Stacks, tuple[Operand, ...], tuple[str, ...]]:
    """The graph of a folded draft, as `Built` has it, and its parameters without a gradient;
    ``shared``: stacks whose layers are written out."""
    draft, results = single_results(stored(draft, constants))
    graph, stacks = graph_of(draft)
    stacks |= shared
    graph = apart_whole(graph)
    check_loops(graph)
    frozen = flat_parameters(constants.arrays, stacks)
    held = [name for name, _ in graph.parameters() if name not in frozen]
    without = {n: t for n, t in graph.tensors.items() if n in held and not t.differentiable}
    if len(without) == len(held):
        shown = first_of(list(without), NAMED)
        raise ParameterWithoutGradient(
            f"the loss gives none of its {len(held)} parameters a gradient, {shown}: it does not "
            "read them, or through jax.lax.stop_gradient or whole numbers alone. Use them in the "
            "loss"
        )
    # As in JAX their gradients are zeros, with which the optimizer steps: it may decay them.
    zeros = {name: replace(t, differentiable=True) for name, t in without.items()}
    return replace(graph, tensors={**graph.tensors, **zeros}), stacks, results, tuple(without)


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
