"""The ranks over which `--fix ep` spreads the experts of a layer, and `--fix etp` the matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.nouns.axes import EXPERT, EXPERT_TENSOR, TENSOR
from autopar.nouns.graph import Graph, Op
from autopar.nouns.layout import LayoutError, alternatives, divisors
from autopar.rules.expert_products import expert_products
from autopar.rules.registry import bind

WITHOUT = {EXPERT: "1"}


def check_experts(graph: Graph, ep: int, framework: str = "torch") -> None:
    """Raises `LayoutError` where the model has no experts, or some that ``ep`` ranks cannot share
    evenly."""
    layers = [(op, experts_of(part, op)) for part, op in _layers(graph)]
    if framework == "jax":
        layers += _written_out(graph)
    if not layers:
        raise LayoutError(
            f"--fix ep={ep}: the model has no layer of experts for ranks to share{_why(graph)}; "
            "leave ep out",
            WITHOUT,
        )
    for op, count in layers:
        if count % ep:
            raise LayoutError(
                f"--fix ep={ep} does not divide the {count} experts at {op.source}: ep may be "
                f"{alternatives(divisors(count))}",
                WITHOUT,
            )


def _why(graph: Graph) -> str:
    """What of a JAX model is none."""
    for part in _parts(graph):
        for op in part.ops:
            if "ragged_dot" in op.kind or op.kind == "grouped_linear":
                return (
                    f", since its groups of rows at {op.source} stay whole: products by groups of "
                    'tokens, jnp.einsum("egcm,emf->egcf", ...), are shared'
                )
    return ""


def _written_out(graph: Graph) -> Iterator[tuple[Op, int]]:
    """Products with the matrices of experts, and how many there are."""
    for part in _parts(graph):
        known = expert_products(part)
        for op in part.ops:
            if op.name in known and known[op.name].matrices:
                yield op, known[op.name].count


def check_matrices(graph: Graph, etp: int) -> None:
    """Raises `LayoutError` where ``etp`` ranks cannot split the matrices of every layer's experts:
    their width does not divide, or a bias behind the second product would be added by each."""
    layers = _layers(graph)
    if not layers and any(_written_out(graph)):
        raise LayoutError(
            f"--fix etp={etp}: of experts that are written out as products tp splits the matrices "
            f"or the experts, as is fastest: take tp={etp} in its place",
            {EXPERT_TENSOR: "1", TENSOR: str(etp)},
        )
    if not layers:
        raise LayoutError(
            f"--fix etp={etp}: the model has no layer of experts whose matrices ranks could split; "
            "leave etp out",
            {EXPERT_TENSOR: "1"},
        )
    for part, op in layers:
        bound = bind(op, part.tensors)
        if op.attrs["bias"] or bound.factors["f"].size % etp:
            width = bound.factors["f"].size
            why = f"does not divide the width of {width} of each expert"
            may = alternatives(divisors(width))
            if op.attrs["bias"]:
                why, may = "would add the experts' bias on every rank", "1 alone; tp splits experts"
            raise LayoutError(
                f"--fix etp={etp} {why} at {op.source}: etp may be {may}", {EXPERT_TENSOR: "1"}
            )


def common_experts(graph: Graph, framework: str = "torch") -> list[int]:
    """Numbers of ranks, more than one, that every layer's experts divide by; none without."""
    counts = {experts_of(part, op) for part, op in _layers(graph)}
    if framework == "jax":
        counts |= {count for _, count in _written_out(graph)}
    return divisors(math.gcd(*counts))[1:] if counts else []


def experts_of(graph: Graph, op: Op) -> int:
    """How many a layer has."""
    return graph.tensors[op.inputs[3]].shape[0]


def _layers(graph: Graph) -> list[tuple[Graph, Op]]:
    return [(part, op) for part in _parts(graph) for op in part.ops if op.kind == "experts"]


def _parts(graph: Graph) -> tuple[Graph, ...]:
    return (graph, *(block.body for block in graph.blocks.values()))
