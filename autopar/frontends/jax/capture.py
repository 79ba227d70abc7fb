"""A JAX loss function to a `Graph`: traced on abstract values, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.frontends.jax.attention import attention_lifted
from autopar.frontends.jax.draft import Draft, Value
from autopar.frontends.jax.errors import (
    CaptureError,
    ControlFlow,
    NotScalarLoss,
    ParameterWithoutGradient,
)
from autopar.frontends.jax.finish import graph_of
from autopar.frontends.jax.fold import folded
from autopar.frontends.jax.idioms import lifted
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.norms import norms_weighted
from autopar.frontends.jax.products import products_named
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.vocabulary import lookups_lifted
from autopar.nouns.graph import Graph

Loss = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Captured:
    """``stacks`` gives, for a leaf of the user's parameter tree that holds all layers of a scan, the
    names that its slices have in the graph; other leaves are named by their own path."""

    graph: Graph
    stacks: Mapping[str, tuple[str, ...]]


def paths_of(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) in tree order; keys and indices joined by dots."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def capture(loss: Loss, params: Any, batch: Mapping[str, Any]) -> Captured:
    """The graph of ``loss(params, batch)``.

    ``params`` is a tree and ``batch`` a dict of arrays or of anything with shape and dtype; only
    shapes are looked at. Raises `CaptureError` and its kinds.
    """
    params = jax.tree.map(_abstract, params)
    batch = {name: _abstract(value) for name, value in batch.items()}
    draft = draft_of(_jaxpr(loss, params, batch), _inputs(params, batch))
    return _captured(draft)


def _captured(draft: Draft) -> Captured:
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
    return Captured(graph, stacks)


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
            f"the loss needs the value of an array while it is traced ({text}). The program must be "
            "the same for every batch: replace if, int() and bool() on arrays by jnp.where"
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
