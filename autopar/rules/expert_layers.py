"""The layers of experts of a graph, by the modules that hold their matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.nouns.graph import Graph, Op

_X, _INDEX, _WEIGHTS, _UP = range(4)
"""Operands of experts; matrices and biases follow from the fourth on."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One call of experts in a graph or in the body of a block.

    part:     the graph that it lies in, ``block`` its name; None: at the top.
    module:   that holds the first matrix, relative to the block; None where that is no parameter,
              or one of the model itself: rows are then not counted by layer.
    modules:  the same with full names, one for each instance of the block.
    experts:  how many, of which a token goes to ``routes``.
    placeable: whether ranks may hold them in another order: that module has all matrices and
              biases, and nothing else reads them.
    """

    part: Graph
    block: str | None
    op: Op
    module: str | None
    modules: tuple[str, ...]
    experts: int
    routes: int
    placeable: bool

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the matrices and biases, whose first dim is that of experts."""
        return matrices_of(self.op)


def matrices_of(op: Op) -> tuple[str, ...]:
    """Of a call of experts, its matrices and biases."""
    return op.inputs[_UP:]


def expert_layers(graph: Graph) -> Iterator[ExpertLayer]:
    """All of a graph and of its blocks."""
    yield from _layers(graph, None, ("",))
    for name, block in graph.blocks.items():
        yield from _layers(block.body, name, tuple(dict.fromkeys(block.instances)))


def _layers(part: Graph, block: str | None, instances: tuple[str, ...]) -> Iterator[ExpertLayer]:
    for op in part.ops:
        if op.kind != "experts":
            continue
        up = op.inputs[_UP]
        module = up.rpartition(".")[0] if part.tensors[up].role == "parameter" else None
        full = tuple(".".join(filter(None, (at, module))) for at in instances)
        if module is None or not all(full):
            module, full = None, ()
        yield ExpertLayer(
            part,
            block,
            op,
            module,
            full,
            part.tensors[up].shape[0],
            part.tensors[op.inputs[_INDEX]].shape[1],
            module is not None and _is_alone(part, op),
        )


def _is_alone(part: Graph, op: Op) -> bool:
    readers = Counter(name for each in part.ops for name in each.inputs)
    readers.update(part.outputs)
    owners = {name.rpartition(".")[0] for name in matrices_of(op)}
    alone = all(
        part.tensors[name].role == "parameter" and readers[name] == 1 for name in matrices_of(op)
    )
    return alone and len(owners) == 1
