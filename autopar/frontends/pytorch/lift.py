"""From the fx graph of aten ops to nodes of op kinds, one for one where that is possible.

`aten` holds what each aten op becomes. This file walks the graph: it binds arguments by name,
gives in-place ops their functional form, and keeps the original call in ``attrs["torch"]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import autocast, ir
from autopar.frontends.pytorch.aten_complex import real_view
from autopar.frontends.pytorch.calls import NotAlike
from autopar.frontends.pytorch.errors import MutationError, UnsupportedOpError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.recording import answered
from autopar.frontends.pytorch.trace import Trace
from autopar.nouns.graph import DTYPE_BYTES, Source, freeze
from autopar.rules.own_functions import ELEMENTWISE, FUNCTION, LINEAR

_MARKS = {
    torch.ops.autopar.enter.default: "enter",
    torch.ops.autopar.leave.default: "leave",
    torch.ops.autopar.call.default: "call",
}
_TRANSFORMS = ("lazy_load_decompositions", "_vmap_increment_nesting", "_grad_increment_nesting")
_WRITES = (
    "{}: the forward writes into {}. Only batch normalisation may update its buffers: compute a "
    "new tensor instead"
)
_ASSIGNED = "_has_compatible_shallow_copy_type"  # asked by ``tensor.data = other``
_STATISTICS = frozenset({"batch_norm", "instance_norm", "cudnn_batch_norm", "native_batch_norm"})
_ERASED = frozenset(
    {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range"}
)


class Lifter:
    """Walks one trace; ``nodes`` grows. The functions of `aten` call `emit` and `constant`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.result: Value | None = None
        self.values: dict[int, Value] = {}  # of the model's own tensors, by id
        self._env: dict[fx.Node, Any] = {}
        self._views: dict[fx.Node, fx.Node] = {}  # view -> what it looks at
        self._version: dict[fx.Node, int] = {}
        self._written = any(_is_inplace(n.target) for n in trace.graph.nodes)
        self._grad = True
        self._regions: list[autocast.Region] = [None]  # of autocast, the innermost last
        self._cast: dict[fx.Node, Value] = {}  # what the op at hand reads instead
        self.source = Source()
        self._counters: dict[str, Source] = {}  # owner of a ``num_batches_tracked`` -> where
        self._entered: dict[fx.Node, int] = {}  # results of "enter" -> kind

    def run(self) -> None:
        place = -1
        for place, node in enumerate(self.trace.graph.nodes):
            self.source = self.trace.sources.at(place)
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
                self._env[node] = value
            elif node.op == "get_attr":
                self._env[node] = self._held(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.result = self.read(node.args[0])
        self._check_counters()

    # -- what the functions of `aten` use ---------------------------------------------------------

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
        node = Node(kind, list(inputs), outputs, freeze(attrs), self.source, self._grad)
        self.nodes.append(node)
        return outputs

    # -- reading and writing values ---------------------------------------------------------------

    def read(self, node: Any) -> Any:
        """The current value of an fx node: a view is looked up again after its base was written."""
        if not isinstance(node, fx.Node):
            return node
        if node in self._cast:
            return self._cast[node]
        base = self._views.get(node)
        if base is not None and self._written:
            current = self._version.get(self._root(node), 0)
            if self._version.get(node, 0) < current:
                self._env[node] = self._lifted(node)
                self._version[node] = current
        return self._env[node]

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._views:
            node = self._views[node]
        return node

    def _write(self, node: fx.Node, value: Value) -> None:
        """``node`` now holds ``value``, and so does what it looks at."""
        base = self._views.get(node)
        if base is None:
            self._check_writable(node)
            self._env[node] = value
            self._version[node] = self._version.get(node, 0) + 1
            return
        from autopar.frontends.pytorch.aten import written_through

        same = _is_inplace(node.target)
        whole = value if same else written_through(self, node, self.read(base), value)
        if whole is None:
            raise MutationError(
                f"{self.source}: {node.target} writes through a view ({node.name}) that has no "
                "functional form here: build the tensor with torch.cat or torch.where instead"
            )
        self._write(base, whole)
        self._env[node] = value
        self._version[node] = self._version[self._root(node)]

    def _check_writable(self, node: fx.Node) -> None:
        held = self._env.get(node)
        if node in self._entered:
            kind = self.trace.kinds[self._entered[node]]
            raise NotAlike(kind.group, "the layer writes into its input")
        if isinstance(held, Value) and held.role in ("parameter", "buffer"):
            raise MutationError(_WRITES.format(self.source, f"{held.role} {held.name!r}"))

    def _refuse_assignment(self, node: fx.Node) -> None:
        held = self.read(node)
        name = f" {held.name!r}" if isinstance(held, Value) and held.name else ""
        raise MutationError(
            f"{self.source}: the forward assigns to .data of a tensor{name}, which no gradient and "
            "no program sees: compute a new tensor instead"
        )

    def _check_writes(self, node: fx.Node) -> None:
        """Refuses what writes into an operand by another way than an in-place op of torch."""
        schema = node.target._schema  # type: ignore[union-attr]
        known = (*_STATISTICS, "detach_")
        if not schema.is_mutable or _is_inplace(node.target) or node.target._opname in known:  # type: ignore[union-attr]
            return
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        given |= node.kwargs
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written or given.get(argument.name) is None:
                continue
            operand: Any = given[argument.name]
            if isinstance(operand, fx.Node):
                self._check_writable(self._root(operand))
            raise MutationError(
                f"{self.source}: {node.target} writes into its operand {argument.name!r}: use the "
                "form that returns a new tensor, without out="
            )

    def _counts_batches(self, node: fx.Node) -> bool:
        """Batch normalisation's counter: part of what ``updates_buffers`` says."""
        held = self._env.get(node.args[0])  # type: ignore[arg-type]
        name = held.name if isinstance(held, Value) else ""
        owner, _, last = name.rpartition(".")
        if last != "num_batches_tracked":
            return False
        if node.users:  # the forward computes with the count
            self._check_writable(node.args[0])  # type: ignore[arg-type]
        self._counters[owner] = self.source
        return True

    def _check_counters(self) -> None:
        """Refuses a counter by that name in a module whose statistics no op updates, and one that
        some op reads."""
        read = {value.name for node in self.nodes for value in node.inputs}
        updating = {
            value.name.rpartition(".")[0]
            for node in self.nodes
            if node.kind == "batch_norm" and node.attrs["updates_buffers"]
            for value in node.inputs
            if value.role == "buffer"
        }
        for owner, source in self._counters.items():
            name = f"{owner}.num_batches_tracked".lstrip(".")
            if owner not in updating or name in read:
                raise MutationError(_WRITES.format(source, f"buffer {name!r}"))

    def _held(self, node: fx.Node) -> Value:
        """The parameter, buffer or constant that a ``get_attr`` node names."""
        tensor = operator.attrgetter(str(node.target))(self.trace.root)
        if isinstance(tensor, torch.Generator):
            raise UnsupportedOpError(
                f"{self.source}: random numbers from a generator of their own, whose state is no "
                "part of a program: draw them without generator=, or give them in the batch"
            )
        known = self.values.get(id(tensor))
        if known is not None:
            return known
        named = self.trace.named.get(id(tensor))
        value = ir.like(tensor)
        if named is not None:
            value.role = "parameter" if named.role == "parameter" else "buffer"
            value.name = named.name
            value.trainable = tensor.requires_grad
            if tensor.is_complex():
                if value.role == "parameter":
                    raise UnsupportedOpError(
                        f"{self.source}: parameter {named.name} is complex; make it of real "
                        "numbers and torch.view_as_complex of them in the forward"
                    )
                value.shape, value.dtype = tuple(tensor.shape), ir.dtype_name(tensor.dtype)
                value = real_view(self, value)
        else:
            group = answered(tensor)
            if group is not None:
                raise NotAlike(
                    group, "a tensor of the layer is used outside without being returned"
                )
            real = getattr(tensor, "constant", tensor)
            if real is None:
                raise UnsupportedOpError(
                    f"{self.source}: a tensor made outside the model and the batch is used, or one "
                    "is read by .data: register it as a buffer, and write .detach() for .data"
                )
            if real.is_complex():
                real = torch.view_as_real(real.resolve_conj())
            data = real.detach().to(torch.float64 if real.dtype.is_floating_point else real.dtype)
            value = self.emit(
                "constant", [], value.shape, value.dtype, value=data.tolist(), dtype=value.dtype
            )
        self.values[id(tensor)] = value
        return value

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        first: Any = node.args[0] if node.args else None
        if target is operator.getitem:
            self._env[node] = self.read(first)[node.args[1]]
            if first in self._entered:
                self._entered[node] = self._entered[first]
            elif first in self._views:
                self._views[node] = first
                self._version[node] = self._version.get(self._root(node), 0)
        elif target in _MARKS:
            kind: Any = node.args[1]
            tensors = [self.read(t) for t in first]
            outputs = [ir.like(t) for t in node.meta["val"]]
            self._env[node] = self.emit_many(_MARKS[target], tensors, outputs, number=kind)
            if _MARKS[target] == "enter":
                self._entered[node] = kind
        elif target is torch.ops.autopar.function.default:
            self._env[node] = self._function(node)
        elif target is torch._C._set_grad_enabled:
            self._grad = bool(first)
        elif isinstance(target, torch._ops.OpOverload):
            if target._opname == _ASSIGNED:
                self._refuse_assignment(first)
            if target._opname in _ERASED or ("val" not in node.meta and not node.users):
                return  # the second: it failed, and the forward went on without it
            if self._written and (base := _viewed(node)) is not None:
                self._views[node] = base
                self._version[node] = self._version.get(self._root(base), 0)
            if _is_inplace(target) and self._counts_batches(node):
                return
            self._check_writes(node)
            result = self._in_region(node)
            if _is_inplace(target):
                self._write(first, result)
                self._views[node] = first
                self._version[node] = self._version.get(self._root(node), 0)
            self._env[node] = result
        else:
            self._other(node)

    def _in_region(self, node: fx.Node) -> Any:
        """`_lifted`, with the casts that autocast makes before it."""
        region = self._regions[-1]
        if region is None or not node.all_input_nodes:
            return self._lifted(node)
        wanted = autocast.casts(node, region, self.source)
        made: dict[fx.Node, Value] = {}
        for operand, dtype in wanted.items():
            value, name = self.read(operand), ir.dtype_name(dtype)
            made[operand] = self.emit("cast", [value], value.shape, name, dtype=name)
        if made and (_is_inplace(node.target) or _viewed(node) is not None):
            raise UnsupportedOpError(
                f"{self.source}: torch.autocast casts what {node.target} writes: cast by hand"
            )
        self._cast = made
        try:
            result = self._lifted(node)
        finally:
            self._cast = {}
        found, meta = result, node.meta.get("val")
        if isinstance(found, Value) and isinstance(meta, torch.Tensor):
            if found.dtype != ir.like(meta).dtype:
                raise UnsupportedOpError(
                    f"{self.source}: {node.target} makes {ir.dtype_name(meta.dtype)} under "
                    f"torch.autocast and {found.dtype} without: cast by hand"
                )
        return result

    def _function(self, node: fx.Node) -> list[Value]:
        """A hand-written derivative; what its backward gives no gradient is detached before."""
        tensors: Any = node.args[0]
        called = self.trace.functions[node.args[1]]  # type: ignore[index]
        if self._regions[-1] is not None:
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
            ELEMENTWISE: called.elementwise,
            LINEAR: called.linear,
        }
        outputs = [ir.like(t) for t in node.meta["val"]]
        made = self.emit_many(called.kind, operands, outputs, **{FUNCTION: function})
        self.nodes[-1].flat = not any(called.graded)
        return [
            value if graded or not value.is_float else self._detached(value)
            for value, graded in zip(made, called.graded, strict=True)
        ]

    def _detached(self, value: Value) -> Value:
        return self.emit("detach", [value], value.shape, value.dtype)

    def _other(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name == "_enter_autocast":
            self._regions.append(autocast.entered(node, self._regions[-1]))
            return
        if name == "_exit_autocast":
            self._regions.pop()
            return
        what = "torch.vmap, torch.func.grad or the like" if name in _TRANSFORMS else name
        raise UnsupportedOpError(
            f"{self.source}: {what} is not supported in a forward: write it with tensor ops"
        )

    def _lifted(self, node: fx.Node) -> Any:
        if _is_inplace(node.target) and node in self._views:
            return self.read(self._views[node])  # it returned what it wrote into
        if node.target is operator.getitem:
            return self.read(node.args[0])[node.args[1]]
        from autopar.frontends.pytorch.aten import lift_call

        return lift_call(self, node)


Lift = Callable[[Lifter, fx.Node, dict[str, Any]], Any]


def _is_inplace(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    name = target._opname
    return name.endswith("_") and not name.endswith("__") and name != "detach_"


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result of ``node`` shares, if any."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or _is_inplace(node.target):
        return None
    made, given = node.meta.get("val"), first.meta.get("val")
    if isinstance(made, list | tuple):
        made = made[0] if made else None
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return None
    same = made.untyped_storage()._cdata == given.untyped_storage()._cdata
    return first if same else None
