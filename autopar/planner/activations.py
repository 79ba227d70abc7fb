"""Activations over one microbatch, from the lives of its tensors.

A tensor lives from the op that makes it to its last reader, or to the backward of the last op that
saves it; a gradient from the backward of its first reader to that of its producer. Blocks repeat,
so the peak lies in the last call of some block, or outside: while call i runs backward the saved
tensors of the calls before it are still there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.lowering import Lowered, LoweredOp, Operand
from autopar.nouns.graph import DTYPE_BYTES, Op
from autopar.nouns.sharding import Sharding
from autopar.rules.work import extents, kept_bytes


@dataclass(frozen=True, slots=True)
class Life:
    """One pass through a graph: ``saved`` at the end of forward, ``peak`` at the worst moment."""

    saved: int
    peak: int
    where: str


def activation_life(lowered: Lowered, recompute: str) -> Life:
    """Follows one microbatch forward and backward."""
    bodies = {name: activation_life(body, recompute) for name, body in lowered.blocks.items()}
    kept_by_call = {
        name: {"none": bodies[name].saved, "compute": _moved_bytes(body), "full": 0}[recompute]
        for name, body in lowered.blocks.items()
    }
    walk = _Walk(lowered, bodies, kept_by_call)
    return walk.run()


def _moved_bytes(body: Lowered) -> int:
    """Results of a block's forward collectives on activations."""
    kept = 0
    for found in body.tensors.values():
        if _moves(found.steps) and found.tensor.differentiable:
            kept += _bytes(body, found.tensor.name, found.shared)
    for op in body.ops:
        for operand in op.operands:
            tensor = body.graph.tensors[operand.name]
            if tensor.role == "activation" and _moves(operand.steps):
                kept += _bytes(body, operand.name, operand.wanted)
    return kept


class _Walk:
    """Live bytes along the ops of one graph; a block call is one op with an inner peak."""

    def __init__(
        self, lowered: Lowered, bodies: Mapping[str, Life], kept: Mapping[str, int]
    ) -> None:
        self.lowered = lowered
        self.bodies = bodies
        self.kept = kept
        self.root = _roots(lowered)
        self.peak = 0
        self.where = ""

    def run(self) -> Life:
        saved_by = self._saved_by()
        total_saved = sum(saved_by.values()) + self._call_bytes()
        self._forward(saved_by)
        self._backward(saved_by, total_saved)
        return Life(total_saved, self.peak, self.where)

    def _note(self, live: int, op: Op) -> None:
        if live > self.peak:
            self.peak, self.where = live, str(op.source)

    def _storage(self, op: LoweredOp, operand: Operand) -> tuple[str, int]:
        """Key and bytes of what the op really reads: the shared copy or its own resharded one."""
        name = operand.name
        if _moves(operand.steps):
            return f"{name}->{operand.wanted}", _bytes(self.lowered, name, operand.wanted)
        root = self.root[name]
        return root, _bytes(self.lowered, root, self.lowered.tensors[root].shared)

    def _saved_by(self) -> dict[str, int]:
        """Storage that outlives forward, with its bytes."""
        saved: dict[str, int] = {}
        tensors = self.lowered.graph.tensors
        for op in self.lowered.ops:
            if not any(tensors[n].differentiable for n in op.op.outputs):
                continue
            if op.bound is None:
                for operand in op.operands:
                    place, size = self._storage(op, operand)
                    saved[place] = size
                continue
            for i in op.bound.rule.saves:
                if i < len(op.operands) and self._counts(op.op.inputs[i]):
                    place, size = self._storage(op, op.operands[i])
                    saved[place] = size
            kept = sum(kept_bytes(op.bound, extents(op.bound, op.strategy, self.lowered.mesh)))
            if kept:
                saved[f"{op.op.name} keeps"] = kept
            for i in op.bound.rule.saves_results:
                name = self.root[op.op.outputs[i]]
                saved[name] = _bytes(self.lowered, name, self.lowered.tensors[name].shared)
        return {
            n: b for n, b in saved.items() if self.lowered.block is None or not self._is_input(n)
        }

    def _is_input(self, place: str) -> bool:
        return place in self.lowered.graph.inputs

    def _counts(self, name: str) -> bool:
        return self.lowered.graph.tensors[self.root[name]].role not in ("parameter", "buffer")

    def _call_bytes(self) -> int:
        return sum(self.kept[op.op.attrs["block"]] for op in self.lowered.ops if op.bound is None)

    def _forward(self, saved: Mapping[str, int]) -> None:
        last: dict[str, int] = {}
        for i, op in enumerate(self.lowered.ops):
            for operand in op.operands:
                last[self._storage(op, operand)[0]] = i
        held = 0  # saved storage made so far, and block calls' saved tensors
        temporary: dict[str, int] = {}
        seen: set[str] = set()
        for i, op in enumerate(self.lowered.ops):
            inner = 0
            for place, size in [self._storage(op, o) for o in op.operands]:
                if place in saved:
                    held += size if place not in seen else 0
                    seen.add(place)
                elif self._counts_place(place):
                    temporary.setdefault(place, size)
            for name in op.op.outputs:
                root = self.root[name]
                size = _bytes(self.lowered, root, self.lowered.tensors[root].shared)
                if root in saved:
                    held += size if root not in seen else 0
                    seen.add(root)
                elif self._counts_place(root):
                    temporary[root] = size
            own = f"{op.op.name} keeps"
            held += saved.get(own, 0)
            if op.bound is None:
                block = op.op.attrs["block"]
                inner = self.bodies[block].peak
            self._note(held + sum(temporary.values()) + inner, op.op)
            if op.bound is None:
                held += self.kept[op.op.attrs["block"]]
            for place in [p for p in temporary if last.get(p, i) <= i]:
                del temporary[place]

    def _counts_place(self, place: str) -> bool:
        if place not in self.lowered.tensors:
            return True
        if self.lowered.block is not None and self._is_input(place):
            return False
        return self._counts(place)

    def _backward(self, saved: Mapping[str, int], total: int) -> None:
        first: dict[str, int] = {}
        for i, op in enumerate(self.lowered.ops):
            places = [self._storage(op, o)[0] for o in op.operands]
            places += [self.root[n] for n in op.op.outputs]
            for place in [*places, f"{op.op.name} keeps"]:
                first.setdefault(place, i)
        tensors = self.lowered.graph.tensors
        held = total
        gradients: dict[str, int] = {}
        release: dict[int, int] = {}
        for place, size in saved.items():
            release[first.get(place, 0)] = release.get(first.get(place, 0), 0) + size
        for i in range(len(self.lowered.ops) - 1, -1, -1):
            op = self.lowered.ops[i]
            if any(tensors[n].differentiable for n in op.op.outputs):
                for operand in op.operands:
                    if tensors[operand.name].differentiable and self._counts(operand.name):
                        root = self.root[operand.name]
                        shared = self.lowered.tensors[root].shared
                        gradients[root] = _bytes(self.lowered, root, shared)
            inner = 0
            if op.bound is None:
                block = op.op.attrs["block"]
                held -= self.kept[block]
                inner = self.bodies[block].peak
            self._note(held + sum(gradients.values()) + inner, op.op)
            held -= release.get(i, 0)
            for name in op.op.outputs:
                if self.root[name] == name:
                    gradients.pop(name, None)


def _roots(lowered: Lowered) -> dict[str, str]:
    root = {name: name for name in lowered.graph.tensors}
    for op in lowered.ops:
        if op.bound is not None and op.bound.rule.view and op.op.inputs:
            if not _moves(op.operands[0].steps):
                for name in op.op.outputs:
                    if not _moves(lowered.tensors[name].steps):
                        root[name] = root[op.op.inputs[0]]
    return root


def _moves(steps: tuple[object, ...]) -> bool:
    return any(getattr(step, "forward", "none") != "none" for step in steps)


def _bytes(lowered: Lowered, name: str, sharding: Sharding) -> int:
    tensor = lowered.graph.tensors[name]
    return math.prod(sharding.local_shape(tensor.shape, lowered.mesh)) * DTYPE_BYTES[tensor.dtype]
