"""Weights that are gathered in 8 bits where ranks share their state.

A weight whose one reader makes 8 bits of it, one scale for all of it, may be made narrow before it
is gathered (of a block that is called again, each call): each rank rounds its piece, and a byte an
element travels. The numbers are those of a weight that is gathered first, for its scale is that of
the whole weight, joined over the ranks that have pieces of it once a step, and rounding is element
by element (torchao's ``enable_fsdp_float8_all_gather``, which takes recipes by tensor too).

Scales of rows and blocks lie along dims of the whole weight, once along each, which pieces of rows
do not have.
"""

from __future__ import annotations

from autopar.nouns.graph import Graph, Op
from autopar.nouns.recipes import RECIPES, Narrow
from autopar.rules.narrow import RECIPE


def gathers_narrow(recipe: str | None) -> bool:
    """Whether weights of layers by ``recipe`` may be."""
    return recipe is not None and RECIPES[recipe].covers == "tensor"


def names_of_narrow(graph: Graph) -> frozenset[str]:
    """The parameters of the unfolded model that may be, by full name."""
    inside = (
        f"{instance}.{name}"
        for block in graph.blocks.values()
        for name in narrow_weights(block.body)
        for instance in block.instances
    )
    return narrow_weights(graph) | {*inside}


def narrow_weights(graph: Graph) -> frozenset[str]:
    """The parameters of a graph, or of a block's body, that may be."""
    readers = graph.consumers()
    return frozenset(
        name
        for name, tensor in graph.tensors.items()
        if tensor.role == "parameter"
        and tensor.differentiable
        and name not in graph.outputs
        and [place for _, place in readers[name]] == [1]
        and _is_read_narrow(readers[name][0][0], graph)
    )


def _is_read_narrow(op: Op, graph: Graph) -> bool:
    """Whether both products that read a layer's weight are narrow, with a scale of the whole."""
    if RECIPE not in op.attrs:
        return False
    narrow = Narrow.parse(op.attrs[RECIPE])
    wanted = ("output", "input") if graph.tensors[op.inputs[0]].differentiable else ("output",)
    return narrow.recipe.covers == "tensor" and {*wanted} <= {*narrow.products}
