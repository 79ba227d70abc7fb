"""The program while it is being rewritten: values and nodes with identity, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.nouns.graph import Role, Source

Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Value:
    """One tensor. ``name`` is set for parameters, buffers and inputs only."""

    shape: Shape
    dtype: str
    role: Role = "activation"
    name: str = ""
    trainable: bool = False

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype


@dataclass(eq=False, slots=True)
class Node:
    """One op; ``grad`` False inside ``torch.no_grad``, ``flat`` where its results are constants to
    autograd whatever the operands are."""

    kind: str
    inputs: list[Value]
    outputs: list[Value]
    attrs: dict[str, Any] = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    grad: bool = True
    flat: bool = False

    @property
    def output(self) -> Value:
        return self.outputs[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def like(tensor: torch.Tensor) -> Value:
    """A value of the tensor's shape and dtype; complex numbers are pairs in one more dim."""
    if any(map(_is_open, tensor.shape)):
        raise UnsupportedOpError(
            "a tensor whose size depends on values of the batch (x[mask], nonzero) is given to a "
            "layer that repeats, or to a function with its own derivative: keep every row there, "
            "and choose afterwards"
        )
    shape = tuple(map(int, tensor.shape))
    if tensor.is_complex():
        return Value((*shape, 2), dtype_name(tensor.dtype.to_real()))
    return Value(shape, dtype_name(tensor.dtype))


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


class Links:
    """Who makes and who reads each value of ``nodes``, at the time of asking."""

    def __init__(self, nodes: Iterable[Node], results: Iterable[Value] = ()) -> None:
        self.maker: dict[Value, Node] = {}
        self.readers: dict[Value, list[Node]] = {}
        self.results = set(results)
        for node in nodes:
            for value in node.outputs:
                self.maker[value] = node
            for value in node.inputs:
                self.readers.setdefault(value, []).append(node)

    def made_by(self, value: Value, *kinds: str) -> Node | None:
        """The node that makes ``value`` if it is of one of ``kinds``."""
        node = self.maker.get(value)
        return node if node is not None and node.kind in kinds else None

    def only(self, value: Value) -> bool:
        """Whether exactly one operand of one node reads ``value``, and nothing else."""
        return len(self.readers.get(value, ())) == 1 and value not in self.results


def replace(nodes: Sequence[Node], swap: dict[Value, Value]) -> None:
    """Makes every reader of a key of ``swap`` read its value instead; chains are followed."""
    if not swap:
        return
    for node in nodes:
        node.inputs = [final(swap, v) for v in node.inputs]


def final(swap: dict[Value, Value], value: Value) -> Value:
    while value in swap:
        value = swap[value]
    return value


def drop_dead(nodes: Sequence[Node], results: Iterable[Value]) -> list[Node]:
    """``nodes`` without those that neither ``results`` nor what the model keeps needs."""
    needed = set(results)
    kept: list[Node] = []
    for node in reversed(nodes):
        effects = node.kind in EFFECTS or node.attrs.get("updates_buffers")
        if effects or needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    kept.reverse()
    return kept


EFFECTS = frozenset({"enter", "leave", "call", "carry"})
