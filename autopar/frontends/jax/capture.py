"""A JAX loss function to a `Graph`: traced on abstract values, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.frontends.captured import Captured
from autopar.frontends.jax.attention import attention_lifted
from autopar.frontends.jax.draft import Draft, Value
from autopar.frontends.jax.errors import (
    CaptureError,
    ControlFlow,
    NotScalarLoss,
    ParameterWithoutGradient,
)
from autopar.frontends.jax.finish import Stacks, graph_of
from autopar.frontends.jax.fold import folded
from autopar.frontends.jax.idioms import lifted
from autopar.frontends.jax.inputs import batch_entries, model_tensors, samples_of, tokens_of
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.norms import norms_weighted
from autopar.frontends.jax.precision import exact_constants
from autopar.frontends.jax.products import products_named
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.vocabulary import lookups_lifted
from autopar.nouns.graph import Graph
from autopar.workload import Workload

Loss = Callable[[Any, Mapping[str, Any]], Any]


def paths_of(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) in tree order; keys and indices joined by dots."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def capture(
    loss: Loss, params: Any, batch: Mapping[str, Any], whole_inputs: tuple[str, ...] = ()
) -> Captured:
    """The graph of ``loss(params, batch)``.

    ``params`` is a tree and ``batch`` a dict of arrays or of anything with shape and dtype; only
    shapes are looked at. ``whole_inputs`` names batch entries without a batch dim. Raises
    `CaptureError` and its kinds.
    """
    params = jax.tree.map(_abstract, params)
    batch = {name: _abstract(value) for name, value in batch.items()}
    closed = _jaxpr(loss, params, batch)
    exact = exact_constants(loss, closed, params, batch)
    graph, stacks = _graph(draft_of(closed, _inputs(params, batch), exact))
    entries = batch_entries(batch, whole_inputs)
    return Captured(
        graph,
        model_tensors(graph),
        entries,
        samples_of(entries),
        tokens_of(entries),
        stacks=stacks,
    )


def capture_workload(workload: Workload) -> Captured:
    """`capture` of a workload that gives ``loss``, ``init`` and ``batch``; nothing is computed."""
    assert workload.loss is not None
    assert workload.init is not None
    params = jax.eval_shape(workload.init, jax.random.key(workload.seed))
    return capture(workload.loss, params, workload.batch(), workload.whole_inputs)


def _graph(draft: Draft) -> tuple[Graph, Stacks]:
    for step in (
        simplified,
        lifted,
        norms_weighted,
        attention_lifted,
        products_named,
        lookups_lifted,
        folded,
    ):
        draft = step(draft)
    graph, stacks = graph_of(draft)
    without = [name for name, t in graph.parameters() if not t.differentiable]
    if without:
        shown = ", ".join(without[:5]) + (", ..." if len(without) > 5 else "")
        raise ParameterWithoutGradient(
            f"the loss does not depend on {len(without)} of {len(list(graph.parameters()))} "
            f"parameters: {shown}. Take them out of the tree, use them in the loss, or pass what "
            "is not trained as a batch entry"
        )
    return graph, stacks


def _abstract(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _inputs(params: Any, batch: Mapping[str, Any]) -> tuple[Value, ...]:
    found = [
        Value(tuple(leaf.shape), str(leaf.dtype), "parameter", path)
        for path, leaf in paths_of(params)
    ]
    found += [
        Value(tuple(leaf.shape), str(leaf.dtype), "input", path) for path, leaf in paths_of(batch)
    ]
    seen: set[str] = set()
    for value in found:
        if value.path in seen:
            raise CaptureError(
                f"{value.path!r} names two leaves of parameters and batch: rename one of them"
            )
        seen.add(value.path)
    return tuple(found)


def _jaxpr(loss: Loss, params: Any, batch: Mapping[str, Any]) -> Any:
    try:
        closed, shapes = jax.make_jaxpr(loss, return_shape=True)(params, batch)
    except jax.errors.ConcretizationTypeError as error:
        text = str(error).partition("\n")[0]
        raise ControlFlow(
            f"the loss needs the value of an array while it is traced ({text}). The program must "
            "be the same for every batch: replace if, int() and bool() on arrays by jnp.where"
        ) from error
    leaves = jax.tree.leaves(shapes)
    single = len(leaves) == 1 and leaves[0].shape == () and "float" in str(leaves[0].dtype)
    if not single:
        shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        raise NotScalarLoss(
            f"the loss function returns {shown}, not one floating-point number: reduce it, as in "
            "losses.mean()"
        )
    return closed
