"""From the fx graph of aten ops to nodes of op kinds, one for one where that is possible.

`aten` holds what each aten op becomes. This file walks the graph and gives in-place ops their
functional form.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import autocast, ir
from autopar.frontends.pytorch.aten import lift_call, written_through
from autopar.frontends.pytorch.carried import carry, settle
from autopar.frontends.pytorch.ctc_targets import by_samples
from autopar.frontends.pytorch.errors import MutationError, UnsupportedOpError
from autopar.frontends.pytorch.gates import gate_steps
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import ASSIGNED, Lifter, is_inplace, viewed
from autopar.frontends.pytorch.limits import hold_limits, is_limit
from autopar.frontends.pytorch.model_tensors import model_tensor
from autopar.frontends.pytorch.noting import Sources
from autopar.frontends.pytorch.skipped_check import Skips
from autopar.frontends.pytorch.trace import Trace
from autopar.frontends.pytorch.writes import (
    check_writable,
    check_writes,
    refuse_assignment,
)
from autopar.rules.own_functions import FUNCTION, LINEAR, RULE
from autopar.torch_private.modes import set_grad
from autopar.torch_private.ops import OpOverload, op_name

_MARKS = {
    torch.ops.autopar.enter.default: "enter",
    torch.ops.autopar.leave.default: "leave",
    torch.ops.autopar.call.default: "call",
}
TRANSFORMS = ("lazy_load_decompositions", "_vmap_increment_nesting", "_grad_increment_nesting")
_ERASED = frozenset(
    {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range"}
)


def lift(trace: Trace) -> Lifter:
    """Walks a trace; the lifter has its nodes, inputs and result."""
    walk = _Walk(trace)
    walk.run()
    return walk


class _Walk(Lifter):
    def run(self) -> None:
        trace = self.trace
        skips = Skips(trace.sources.skips, trace.graph, self, self.chosen.table.unchanged)
        for place, node in enumerate(trace.graph.nodes):
            skips.at(place)
            self.source = trace.sources.at(place)
            if node.op == "placeholder":
                name = self.trace.batch[len(self.inputs)]
                value = ir.like(node.meta["val"])
                if node.meta["val"].is_complex():
                    raise UnsupportedOpError(
                        f"batch[{name!r}] is complex: give its real and imaginary parts, as "
                        "torch.view_as_real makes them"
                    )
                value.role, value.name = "input", name
                self.inputs.append(value)
                self.env[node] = value
            elif node.op == "get_attr":
                self._hold(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.result = self.read(node.args[0])
        settle(self)

    def lifted(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.read(self.views[node])
        if node in self.views and (is_inplace(node.target) or _into(node) is not None):
            return self.read(self.views[node])  # it returned what it wrote into
        if node.target is operator.getitem:
            return self.read(node.args[0])[node.args[1]]
        return self.chosen.lift(node) if self.chosen.meets(node) else self.lifted_plainly(node)

    def lifted_plainly(self, node: fx.Node) -> Any:
        return lift_call(self, node)

    # -- writing values ----------------------------------------------------------------------------

    def _write(self, node: fx.Node, value: Value) -> None:
        """``node`` now holds ``value``, and so does what it looks at."""
        base = self.views.get(node)
        if base is None:
            check_writable(self, node)
            self.env[node] = value
            self.version[node] = self.version.get(node, 0) + 1
            if node in self.buffers:
                carry(self, self.buffers[node], value)
            return
        same = node.op == "get_attr" or is_inplace(node.target) or _into(node) is not None
        whole = value if same else written_through(self, node, self.read(base), value)
        if whole is None:
            raise MutationError(
                f"{self.source}: {node.target} writes through a view ({node.name}) that has no "
                "functional form here: build the tensor with torch.cat or torch.where instead"
            )
        self._write(base, whole)
        self.env[node] = value
        self.version[node] = self.version[self.root(node)]

    def _hold(self, node: fx.Node) -> None:
        """A ``get_attr`` node holds the tensor that it names, as the first that names it does."""
        self.env[node] = held = model_tensor(self, node)
        first = self.first.setdefault(held, node)
        if first is not node:
            self.views[node] = first
            self.version[node] = 0
        elif held.role == "buffer":
            self.buffers[node] = held

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        first: Any = node.args[0] if node.args else None
        if self.chosen.is_unread(node):
            return
        if self.chosen.is_size(node):
            self.env[node] = self.chosen.size(node)
        elif target is operator.getitem:
            self.env[node] = self.read(first)[node.args[1]]
            if first in self.entered:
                self.entered[node] = self.entered[first]
            elif first in self.views:
                self.views[node] = first
                self.version[node] = self.version.get(self.root(node), 0)
        elif target in _MARKS:
            kind: Any = node.args[1]
            tensors = [self.read(t) for t in first]
            outputs = [ir.like(t) for t in node.meta["val"]]
            self.env[node] = self.emit_many(_MARKS[target], tensors, outputs, number=kind)
            if _MARKS[target] == "enter":
                self.entered[node] = kind
        elif target is torch.ops.autopar.function.default:
            self.env[node] = self._function(node)
        elif target is torch.ops.autopar.experts.default:
            self.env[node] = self._experts(node)
        elif target is torch.ops.autopar.row_places.default:
            mask, made = self.read(first), ir.like(node.meta["val"])
            count = made.shape[1]
            self.env[node] = self.emit("row_places", [mask], made.shape, "int64", count=count)
        elif target is torch.ops.autopar.ctc_loss.default:
            self.env[node] = self._ctc_loss(node)
        elif target is set_grad:
            self.grad = bool(first)
        elif isinstance(target, OpOverload):
            if op_name(target) == ASSIGNED:
                self._assign(node)
            if op_name(target) in _ERASED or ("val" not in node.meta and not node.users):
                return  # the second: it failed, and the forward went on without it
            if self.written and (base := viewed(node)) is not None:
                self.views[node] = base
                self.version[node] = self.version.get(self.root(base), 0)
            given = _into(node)
            if given is None or self.root(given) not in self.buffers:
                given = None
                check_writes(self, node)
            before = len(self.nodes)
            result = self._in_region(node)
            if isinstance(given, fx.Node):
                self._write(given, result)
                self.views[node] = given
                self.version[node] = self.version.get(self.root(given), 0)
            if is_inplace(target) and is_limit(self, node, result):
                hold_limits(self, node, result, before)
                self.env[node] = self.read(first)
                return
            if is_inplace(target):
                self._write(first, result)
                self.views[node] = first
                self.version[node] = self.version.get(self.root(node), 0)
            self.env[node] = result
        else:
            self._other(node)

    def _assign(self, node: fx.Node) -> None:
        """``buffer.data = value``"""
        held, value = node.args[:2]
        assert isinstance(held, fx.Node)
        root = self.root(held)
        made = self.read(value)
        same = isinstance(made, Value) and (made.shape, made.dtype) == _form(self.env[root])
        if root not in self.buffers or not same:
            refuse_assignment(self, held)
        self._write(root, made)

    def _in_region(self, node: fx.Node) -> Any:
        """`_lifted`, with the casts that autocast makes before it."""
        region = self.regions[-1]
        if region is None or not node.all_input_nodes:
            return self.lifted(node)
        wanted = autocast.casts(node, region, self.source)
        made: dict[fx.Node, Value] = {}
        for operand, dtype in wanted.items():
            value, name = self.read(operand), ir.dtype_name(dtype)
            made[operand] = self.emit("cast", [value], value.shape, name, dtype=name)
        if made and (is_inplace(node.target) or viewed(node) is not None):
            raise UnsupportedOpError(
                f"{self.source}: torch.autocast casts what {node.target} writes: cast by hand"
            )
        self.cast = made
        try:
            result = self.lifted(node)
        finally:
            self.cast = {}
        output, meta = result, node.meta.get("val")
        if isinstance(output, Value) and isinstance(meta, torch.Tensor):
            if output.dtype != ir.like(meta).dtype:
                raise UnsupportedOpError(
                    f"{self.source}: {node.target} makes {ir.dtype_name(meta.dtype)} under "
                    f"torch.autocast and {output.dtype} without: cast by hand"
                )
        return result

    def _function(self, node: fx.Node) -> list[Value]:
        """A hand-written derivative; what its backward gives no gradient is detached before."""
        tensors: Any = node.args[0]
        called = self.trace.functions[node.args[1]]  # type: ignore[index]
        if self.regions[-1] is not None:
            raise UnsupportedOpError(
                f"{self.source}: {called.kind} (torch.autograd.Function) under torch.autocast: "
                "call it where autocast is off, enabled=False"
            )
        operands = [
            value if reached or not value.is_float else self._detached(value)
            for value, reached in zip(map(self.read, tensors), called.reached, strict=True)
        ]
        function = {
            "path": called.path,
            "args": called.args,
            RULE: called.rule,
            LINEAR: called.linear,
        }
        outputs = [ir.like(t) for t in node.meta["val"]]
        made = self.emit_many(called.kind, operands, outputs, **{FUNCTION: function})
        self.nodes[-1].flat = not any(called.graded)
        return [
            value if graded or not value.is_float else self._detached(value)
            for value, graded in zip(made, called.graded, strict=True)
        ]

    def _experts(self, node: fx.Node) -> list[Value]:
        """All experts of a layer; what lies between their products is walked like a trace."""
        tensors: Any = node.args[0]
        called = self.trace.experts[node.args[1]]  # type: ignore[index]
        if self.regions[-1] is not None:
            raise UnsupportedOpError(
                f"{self.source}: experts under torch.autocast: name the precision in the plan "
                "instead, --precision bf16"
            )
        gate = lift(
            replace(
                self.trace,
                graph=called.gate.graph,
                root=called.gate.root,
                batch=("h",),
                sources=Sources.all_at(self.source),
            )
        )
        if gate.limits:
            raise UnsupportedOpError(
                f"{self.source}: between the products of {called.name} a parameter is written into"
            )
        reads, steps = gate_steps(gate, called.name)
        (x, *_) = operands = [self.read(t) for t in tensors]
        made = self.emit(
            "experts", operands, x.shape, x.dtype,
            reads=reads, gate=steps, transposed=called.transposed, bias=called.bias,
        )  # fmt: skip
        return [made]

    def _ctc_loss(self, node: fx.Node) -> Value:
        *tensors, blank, infinity = node.args
        x, targets, given_times, lengths = (self.read(t) for t in tensors)
        targets = by_samples(self.chosen.table, targets, lengths)
        operands = [x, targets, given_times, lengths]
        given = {"blank": blank, "zero_infinity": infinity}
        made = self.emit("ctc_loss", operands, x.shape[1:2], x.dtype, **given)
        self.chosen.follow(self.nodes.pop())
        return made

    def _detached(self, value: Value) -> Value:
        return self.emit("detach", [value], value.shape, value.dtype)

    def _other(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name == "_enter_autocast":
            self.regions.append(autocast.entered(node, self.regions[-1]))
            return
        if name == "_exit_autocast":
            self.regions.pop()
            return
        what = "torch.vmap, torch.func.grad or the like" if name in TRANSFORMS else name
        raise UnsupportedOpError(
            f"{self.source}: {what} is not supported in a forward: write it with tensor ops"
        )


def _into(node: fx.Node) -> fx.Node | None:
    """What an op is given to write its result into: ``out=``."""
    given = node.kwargs.get("out")
    return given if isinstance(given, fx.Node) else None


def _form(value: Value) -> tuple[tuple[int, ...], str]:
    return value.shape, value.dtype
