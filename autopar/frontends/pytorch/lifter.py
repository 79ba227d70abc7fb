"""The state of one walk over an fx graph: the nodes made, and what each fx node is now.

The functions of `aten` get it: they read operands and emit nodes. `lift` is the walk itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import autocast
from autopar.frontends.pytorch.chosen import Chosen
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Node, Shape, Value
from autopar.frontends.pytorch.trace import Trace
from autopar.nouns.graph import DTYPE_BYTES, Source, freeze
from autopar.torch_private.ops import OpOverload, op_name, plain_name
from autopar.torch_private.tensors import memory_of


class Lifter(ABC):
    """``nodes`` grows; ``source`` is where the op at hand stands in the model.

    env:     what each fx node is, a `Value` or a list of them. views: what each one looks at.
    version: how often a node's memory was written when its value was read.
    cast:    what the op at hand reads instead, under autocast; the innermost region is the last.
    first:   the first ``get_attr`` node of each of the model's tensors, which the others look at;
             buffers: those that hold buffers, and these as the forward found them.
    entered: results of an "enter" mark, by the number of their layer's kind.
    chosen:  values with rows that a mask chooses.
    limits:  parameters that the forward keeps between limits, see `limits`.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.result: Value | None = None
        self.values: dict[int, Value] = {}  # of the model's own tensors, by id
        self.env: dict[fx.Node, Any] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.written = any(map(_may_write, trace.graph.nodes))
        self.grad = True
        self.regions: list[autocast.Region] = [None]
        self.cast: dict[fx.Node, Value] = {}
        self.source = Source()
        self.first: dict[Value, fx.Node] = {}  # of the model's own tensors
        self.buffers: dict[fx.Node, Value] = {}
        self.entered: dict[fx.Node, int] = {}
        self.chosen = Chosen(self)
        self.limits: dict[str, Any] = {}

    @abstractmethod
    def lifted(self, node: fx.Node) -> Any:
        """What an fx node becomes, emitted now."""

    @abstractmethod
    def lifted_plainly(self, node: fx.Node) -> Any:
        """The same, where no mask chooses rows of its tensors."""

    def emit(
        self,
        kind: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        dtype: str,
        /,
        **attrs: Any,
    ) -> Value:
        """A node with one result of the given shape and dtype."""
        out = Value(tuple(shape), dtype)
        return self.emit_many(kind, inputs, [out], **attrs)[0]

    def emit_many(
        self, kind: str, inputs: Sequence[Value], outputs: list[Value], /, **attrs: Any
    ) -> list[Value]:
        for value in outputs:
            if value.dtype not in DTYPE_BYTES:
                raise UnsupportedOpError(
                    f"{self.source}: {kind} makes a {value.dtype} tensor; tensors here are "
                    f"{', '.join(DTYPE_BYTES)}: write it with real numbers"
                )
        node = Node(kind, list(inputs), outputs, freeze(attrs), self.source, self.grad)
        self.nodes.append(node)
        return outputs

    def emit_like(self, kind: str, x: Value, /, *others: Value, **attrs: Any) -> Value:
        """A node whose result has the shape and dtype of its first operand."""
        return self.emit(kind, [x, *others], x.shape, x.dtype, **attrs)

    def reshape(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == shape else self.emit("reshape", [x], shape, x.dtype, shape=shape)

    def expand(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == shape else self.emit("expand", [x], shape, x.dtype, shape=shape)

    def as_dtype(self, x: Value, dtype: str) -> Value:
        return x if x.dtype == dtype else self.emit("cast", [x], x.shape, dtype, dtype=dtype)

    def transpose(self, x: Value, dims: Shape) -> Value:
        if dims == tuple(range(len(dims))):
            return x
        return self.emit("transpose", [x], tuple(x.shape[d] for d in dims), x.dtype, dims=dims)

    def slice(self, x: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
        size = len(range(start, stop, step))
        if size == x.shape[dim]:
            return x
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        return self.emit("slice", [x], shape, x.dtype, dim=dim, start=start, stop=stop, step=step)

    def full(self, shape: Shape, value: Any, dtype: str) -> Value:
        return self.emit("full", [], shape, dtype, shape=shape, value=value, dtype=dtype)

    def arange(self, count: int, dtype: str = "int64") -> Value:
        """The numbers below ``count``."""
        return self.emit("arange", [], (count,), dtype, start=0, stop=count, step=1, dtype=dtype)

    def maker(self, value: Value) -> Node | None:
        return next((n for n in reversed(self.nodes) if value in n.outputs), None)

    def read(self, node: Any) -> Any:
        """The current value of an fx node: a view is looked up again after its base was written."""
        if not isinstance(node, fx.Node):
            return node
        if node in self.cast:
            return self.cast[node]
        base = self.views.get(node)
        if base is not None and self.written:
            current = self.version.get(self.root(node), 0)
            if self.version.get(node, 0) < current:
                self.env[node] = self.lifted(node)
                self.version[node] = current
        return self.env[node]

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.views:
            node = self.views[node]
        return node


ASSIGNED = "_has_compatible_shallow_copy_type"  # asked by ``tensor.data = other``


def _may_write(node: fx.Node) -> bool:
    named = op_name(node.target)
    return is_inplace(node.target) or "out" in node.kwargs or named == ASSIGNED


def is_inplace(target: Any) -> bool:
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return plain_name(target) != op_name(target) and op_name(target) != "detach_"


def viewed(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result of ``node`` shares, if any."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or is_inplace(node.target) or "out" in node.kwargs:
        return None
    made, given = node.meta.get("val"), first.meta.get("val")
    if isinstance(made, list | tuple):
        made = made[0] if made else None
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return None
    same = memory_of(made) == memory_of(given)
    return first if same else None
