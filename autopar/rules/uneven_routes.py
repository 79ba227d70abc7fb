"""A graph whose experts say how unevenly routes go to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.nouns.graph import Graph, Op, with_ops
from autopar.nouns.imbalance import Imbalance, ImbalanceError
from autopar.rules.experts import IMBALANCE


def with_imbalance(graph: Graph, imbalance: Imbalance | None) -> Graph:
    """``graph`` with the imbalance at every layer of experts; itself where routes are even.

    A worst step beyond what a layer can have is taken as that.
    """
    if imbalance is None or imbalance.even:
        return graph

    def of(part: Graph, op: Op) -> Op:
        if op.kind != "experts":
            return op
        most = _most(part, op)
        pair = (min(imbalance.mean, most), min(imbalance.worst, most))
        return replace(op, attrs={**op.attrs, IMBALANCE: pair})

    return with_ops(graph, of)


def check_imbalance(graph: Graph, imbalance: Imbalance) -> None:
    """Raises `ImbalanceError` where the model has no experts, or some that cannot be so busy."""
    layers = list(_layers(graph))
    if not layers:
        raise ImbalanceError(
            f"--expert-imbalance {imbalance.mean:g}: the model has no layer of experts that routes "
            "go to; leave it out"
        )
    for part, op in layers:
        if imbalance.mean > (most := _most(part, op)):
            experts, routes = _sizes(part, op)
            raise ImbalanceError(
                f"--expert-imbalance {imbalance.mean:g}: of the {experts} experts at {op.source} a "
                f"token goes to {routes}, so the busiest has at most {experts} / {routes} = "
                f"{most:g} times the mean; give a number from 1 to {most:g}"
            )


def _layers(graph: Graph) -> Iterator[tuple[Graph, Op]]:
    for part in (graph, *(block.body for block in graph.blocks.values())):
        yield from ((part, op) for op in part.ops if op.kind == "experts")


def _most(part: Graph, op: Op) -> float:
    """Where every token goes to one expert, that one over the mean."""
    experts, routes = _sizes(part, op)
    return experts / routes


def _sizes(part: Graph, op: Op) -> tuple[int, int]:
    """Experts of a layer, and those that a token goes to."""
    return part.tensors[op.inputs[3]].shape[0], part.tensors[op.inputs[1]].shape[1]
