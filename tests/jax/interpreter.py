"""The loss that a graph means, in plain jnp: the referee for lifting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.frontends.jax.interpret import Arrays, run, widened
from autopar.nouns.graph import Graph


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
