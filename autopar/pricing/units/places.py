"""Where the tensors of a graph lie in memory, and what of them outlives the forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.lowering.lowered import Lowered, LoweredOp, Operand
from autopar.lowering.precision import HALF, OWN_CASTS
from autopar.nouns.axes import SLICE
from autopar.nouns.graph import DTYPE_BYTES, Op
from autopar.nouns.sharding import Sharding
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.implementations.table import KEPT_ROWS


class Places:
    """Where the tensors of one graph lie, and what of them outlives forward, under any policy.

    A place is a tensor's own storage by its name, or ``name->sharding`` of a copy for one reader.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.root = roots(lowered)
        self.size = {
            name: bytes_of(lowered, name, lowered.tensors[name].shared)
            for name in dict.fromkeys(self.root.values())
        }
        self.reads = [[self._read(operand) for operand in op.operands] for op in lowered.ops]
        self.makes = [[self.root[name] for name in op.op.outputs] for op in lowered.ops]
        self.saved = {
            place: size
            for place, size in self._saved()
            if lowered.block is None or not self._is_input(place)
        }

    def _read(self, operand: Operand) -> tuple[str, int]:
        """Place and bytes of what an op really reads: the shared copy or its own resharded one."""
        if moves(operand.steps):
            name, wanted = operand.name, operand.wanted
            return f"{name}->{wanted}", bytes_of(self.lowered, name, wanted)
        root = self.root[operand.name]
        return root, self.size[root]

    def _saved(self) -> Iterator[tuple[str, int]]:
        """What outlives forward, with its bytes; one place may come twice."""
        tensors = self.lowered.graph.tensors
        for op, reads in zip(self.lowered.ops, self.reads, strict=True):
            if not any(tensors[n].differentiable for n in op.op.outputs):
                continue
            if op.bound is None:
                yield from reads
                continue
            for i in op.bound.rule.saves:
                if i < len(op.operands) and self.is_activation(op.op.inputs[i]):
                    yield self._kept(op.op, i, reads[i])
            kept = sum(kept_bytes(op.bound, op.strategy, self.lowered.mesh))
            kept += later_bytes(self.lowered, op)
            if kept:
                yield f"{op.op.name} keeps", kept
            for i in op.bound.rule.saves_results:
                root = self.root[op.op.outputs[i]]
                yield root, self.size[root]

    def _kept(self, op: Op, position: int, read: tuple[str, int]) -> tuple[str, int]:
        """What is kept of an operand: float32 that meets a narrower stream takes its dtype first,
        and that copy is what the op sees."""
        tensors = self.lowered.graph.tensors
        operand, result = tensors[op.inputs[position]].dtype, tensors[op.outputs[0]].dtype
        if operand != "float32" or result not in HALF or op.kind in OWN_CASTS:
            return read
        place, size = read
        return f"{place}->{result}", size // DTYPE_BYTES[operand] * DTYPE_BYTES[result]

    def _is_input(self, place: str) -> bool:
        return place in self.lowered.graph.inputs

    def is_activation(self, name: str) -> bool:
        """Neither a parameter nor a buffer, nor a view of one."""
        return self.lowered.graph.tensors[self.root[name]].role not in ("parameter", "buffer")

    def is_temporary(self, place: str) -> bool:
        """Memory of this pass, if nothing saves it: no state, and no block's input."""
        if place not in self.lowered.tensors:
            return True
        if self.lowered.block is not None and self._is_input(place):
            return False
        return self.is_activation(place)


def later_bytes(lowered: Lowered, op: LoweredOp) -> int:
    """What later slices of a sequence give to the gradients of a slice's keys and values, in
    float32 at least; none to those of the last."""
    if KEPT_ROWS not in op.implementations:
        return 0
    slices, whole = lowered.mesh.size(SLICE), 0
    for operand in op.operands[1:3]:
        tensor = lowered.graph.tensors[operand.name]
        wide = max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["float32"])
        whole += math.prod(operand.wanted.local_shape(tensor.shape, lowered.mesh)) * wide
    return whole * (slices - 1) // slices


def roots(lowered: Lowered) -> dict[str, str]:
    """Of each tensor the one whose memory it lies in: a view lies in what it views."""
    root = {name: name for name in lowered.graph.tensors}
    for op in lowered.ops:
        if op.bound is not None and op.bound.rule.view and op.op.inputs:
            if not moves(op.operands[0].steps):
                for name in op.op.outputs:
                    if not moves(lowered.tensors[name].steps):
                        root[name] = root[op.op.inputs[0]]
    return root


def moves(steps: tuple[object, ...]) -> bool:
    """Whether any of them is a collective of the forward pass."""
    return any(getattr(step, "forward", "none") != "none" for step in steps)


def bytes_of(lowered: Lowered, name: str, sharding: Sharding) -> int:
    """Of one rank's part of a tensor under a sharding, in one microbatch."""
    tensor = lowered.graph.tensors[name]
    return math.prod(sharding.local_shape(tensor.shape, lowered.mesh)) * DTYPE_BYTES[tensor.dtype]
