"""The loss that a graph means, in plain jnp: the referee for lifting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.frontends.jax import Captured
from autopar.frontends.jax.interpret import Arrays, flat_parameters, run, widened
from autopar.nouns.graph import Graph
from autopar.runtime.verify.jax.reference import reference_of

LOSS = 1e-12
GRADIENT = 1e-12  # of each gradient's norm, or of the norm of all where it is zero in theory


def interpret(graph: Graph, wide: bool = False) -> Callable[[Arrays, Arrays], Any]:
    """``loss(params, batch)`` with ``params`` by full name, see `Graph.parameters`.

    ``wide``: float64 wherever an op of the graph asks for a narrower float.
    """
    graph = widened(graph) if wide else graph

    def loss(params: Arrays, batch: Arrays) -> Any:
        env: dict[str, Any] = {**params, **batch}
        run(graph, env, graph, params)
        return env[graph.outputs[0]]

    return loss


def compare(
    captured: Captured, loss: Callable[..., Any], params: Any, batch: Any, given: Any = None
) -> None:
    """Value and gradients of the graph against those of the loss in float64, on ``given``
    parameters and batch, by default ``params`` and ``batch`` themselves, whose dtypes are those
    that the loss is called with."""
    graph = interpret(captured.graph, wide=True)
    with jax.enable_x64(True):
        weights, data = given or (jax.tree.map(_wide, tree) for tree in (params, batch))
        wanted, gradients = jax.jit(reference_of(loss, params, batch).function)(weights, data)
        constants = {n: _wide(np.asarray(a)) for n, a in captured.constants.items()}
        if captured.draws is not None:
            data = data | captured.draws.counted(data, wide=True)
        actual, ours = jax.jit(
            jax.value_and_grad(
                lambda p, given: graph(flat_parameters(p, captured.stacks) | constants, given)
            )
        )(weights, data)
        assert abs(actual - wanted) <= LOSS * abs(wanted)
        right, seen = (  # no compiled op for each of their shapes
            [np.asarray(g) for g in jax.tree.leaves(tree)] for tree in (gradients, ours)
        )
        whole = np.sqrt(sum(np.square(g).sum() for g in right))
        assert whole > 0
        for g, o in zip(right, seen, strict=True):
            norm = np.linalg.norm(g)
            scale = norm if norm > 1e-12 * whole else whole
            assert np.linalg.norm(g - o) <= GRADIENT * scale


def _wide(a: Any) -> Any:
    return np.asarray(a, np.float64) if "float" in str(a.dtype) else a
