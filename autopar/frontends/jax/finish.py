"""From a finished draft to the `Graph`: numbers into attrs, names, roles, blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.frontends.jax.constants import beside_products
from autopar.frontends.jax.draft import (
    Builder,
    Draft,
    Node,
    Operand,
    Uniform,
    Value,
    ordered,
    rewrite,
)
from autopar.frontends.jax.errors import CaptureError
from autopar.frontends.jax.gradients import differentiable
from autopar.frontends.jax.naming import common_parent, modules
from autopar.frontends.jax.shared_stacks import Stacks
from autopar.frontends.jax.simplify import BINARY
from autopar.nouns.graph import Block, Graph, Op, Role, Source, Tensor, unique


def graph_of(draft: Draft) -> tuple[Graph, Stacks]:
    """The graph of a draft, and how its stacked parameters are named there."""
    draft = ordered(rewrite(draft, _numbers_into_attrs))
    return _Finisher(differentiable(draft)).graph(draft)


def _numbers_into_attrs(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """Numbers become attrs where the kind has one for them, tensors elsewhere."""
    if all(isinstance(x, Value) for x in node.inputs):
        return None
    values = node.values
    attrs = dict(node.attrs)
    if node.kind in BINARY and len(values) == 1:
        number = next(x for x in node.inputs if isinstance(x, Uniform))
        attrs["other"] = number.value
        if number is node.inputs[0]:
            attrs["scalar_first"] = True
    elif node.kind == "where" and isinstance(node.inputs[0], Value):
        for name, x in zip("ab", node.inputs[1:], strict=True):
            if isinstance(x, Uniform):
                attrs[name] = x.value
    else:
        values = tuple(map(builder.tensor, node.inputs))
        outs = tuple(replace(o) for o in node.outputs)
        builder.append(replace(node, inputs=values, outputs=outs))
        return outs
    shape = values[0].shape if len(values) == 1 else node.out.shape
    made = builder.op(node.kind, values, shape, node.out.dtype, **attrs)
    return [builder.expand(made, node.out.shape)]


class _Finisher:
    """Names the values of a draft and of the bodies in it."""

    def __init__(self, grads: set[Value]) -> None:
        self.grads = grads
        self.blocks: dict[str, Block] = {}
        self.stacks: Stacks = {}
        self.buffers: set[Value] = set()

    def graph(self, draft: Draft) -> tuple[Graph, Stacks]:
        inputs = tuple(v.path for v in draft.inputs if v.role == "input")
        scanned = _only_stacked(draft)
        self.buffers = beside_products(draft)
        tensors: dict[str, Tensor] = {}
        names: dict[Value, str] = {}
        for value in draft.inputs:
            if value not in scanned:
                names[value] = value.path
                tensors[value.path] = self._tensor(value, value.path)
        ops = self._ops(draft, "", names, tensors)
        outputs = tuple(names[v] for v in draft.outputs if isinstance(v, Value))
        for name in outputs:
            tensors[name] = replace(tensors[name], role="output")
        self._check_holders(tensors)
        return Graph(tensors, tuple(ops), inputs, outputs, self.blocks), self.stacks

    def _check_holders(self, outside: Mapping[str, Tensor]) -> None:
        """A parameter that two blocks held, or one and what stands ``outside``, would be two arrays
        in a program, each with a part of its gradient."""
        holder = dict.fromkeys(outside, "the model itself")
        for block in self.blocks.values():
            held = [n for n, t in block.body.tensors.items() if t.role in ("parameter", "buffer")]
            for name in (f"{i}.{n}" for i in dict.fromkeys(block.instances) for n in held):
                if holder.setdefault(name, block.name) != block.name:
                    raise CaptureError(
                        f"parameter {name!r} belongs to the layers of {holder[name]!r} and of "
                        f"{block.name!r}: go over these layers in a loop of Python, each with a "
                        "leaf of its own"
                    )

    def _ops(
        self, draft: Draft, prefix: str, names: dict[Value, str], tensors: dict[str, Tensor]
    ) -> list[Op]:
        module_of = modules(draft, prefix)
        ops: list[Op] = []
        taken = set(tensors)
        for node in draft.nodes:
            if node.kind == "scan":
                ops.extend(self._calls(node, names, tensors))
                continue
            module = module_of[node]
            kind = node.kind.replace("::", ".")
            base = f"{module}/{kind}" if module else kind
            name, made = _results(base, len(node.outputs), taken)
            taken.update((name, *made))
            for out, own in zip(node.outputs, made, strict=True):
                names[out] = own
                tensors[own] = self._tensor(out, own)
            source = replace(node.source, module=module)
            attrs = dict(node.attrs)
            outs = tuple(names[o] for o in node.outputs)
            ops.append(Op(node.kind, tuple(names[v] for v in node.values), outs, attrs, source))
        return ops

    def _calls(self, node: Node, names: dict[Value, str], tensors: dict[str, Tensor]) -> list[Op]:
        """One op of kind ``block`` for every layer."""
        block = self._block(node)
        consts = node.attrs["consts"]
        each = node.attrs.get("each", {})
        reverse = -1 if node.attrs["reverse"] else 1
        rows = [
            each.get(own, (v,))[::reverse]
            for own, v in zip(node.attrs["body"].inputs, node.values[:consts], strict=False)
        ]
        carry = [names[v] for v in node.values[consts : _split(node)]]
        ops = []
        instances = block.instances
        for layer, instance in enumerate(instances):
            fixed = [names[row[layer] if len(row) > 1 else row[0]] for row in rows]
            outs: list[str] = []
            for out in node.outputs:
                name = unique(f"{instance}/block", (*tensors, *outs))
                outs.append(name)
                if instance == instances[-1]:
                    names[out] = name
                tensors[name] = self._tensor(out, name)
            source = Source(instance, node.source.file, node.source.line)
            attrs: Mapping[str, Any] = {"block": block.name, "instance": instance}
            ops.append(Op("block", (*fixed, *carry), tuple(outs), attrs, source))
            carry = outs
        return ops

    def _block(self, node: Node) -> Block:
        body: Draft = node.attrs["body"]
        split = _split(node)
        stacked = body.inputs[split:]
        instances = node.attrs.get("instances")
        if instances is None:  # a scan over stacked parameters
            prefix = common_parent([v.path for v in stacked])
            order = range(node.attrs["length"])
            instances = tuple(f"{prefix or 'layer'}.{i}" for i in order)
            for value in stacked:
                rest = value.path[len(prefix) :].lstrip(".")
                self.stacks[value.path] = tuple(f"{i}.{rest}" for i in instances)
            if node.attrs["reverse"]:
                instances = instances[::-1]
        else:
            prefix = instances[0].rpartition(".")[0]
        tensors: dict[str, Tensor] = {}
        names: dict[Value, str] = {}
        consts = node.attrs["consts"]
        own = {v: v.path[len(prefix) :].lstrip(".") for v in body.inputs if v.role == "parameter"}
        for i, value in enumerate(body.inputs):
            if value in own:
                name = own[value]
            elif i < consts:
                name = unique("shared" if consts == 1 else f"shared{i}", own.values())
            else:
                name = unique("x" if split - consts == 1 else f"x{i - consts}", own.values())
            names[value] = name
            tensors[name] = self._tensor(value, name, "input" if i < split else None)
        ops = self._ops(body, prefix, names, tensors)
        inputs = tuple(names[v] for v in body.inputs[:split])
        outputs = tuple(names[v] for v in body.outputs if isinstance(v, Value))
        for name in outputs:
            if tensors[name].role == "activation":
                tensors[name] = replace(tensors[name], role="output")
        name = unique(prefix or "layer", self.blocks)
        block = Block(name, Graph(tensors, tuple(ops), inputs, outputs), instances)
        self.blocks[name] = block
        return block

    def _tensor(self, value: Value, name: str, role: Role | None = None) -> Tensor:
        shown: Role = role or value.role
        if shown == "parameter" and ("float" not in value.dtype or value in self.buffers):
            shown = "buffer"
        return Tensor(name, value.shape, value.dtype, shown, value in self.grads)


def _results(base: str, count: int, taken: set[str]) -> tuple[str, list[str]]:
    """A name of an op and those of what it gives, none of them taken: an op of several results
    calls them ``split.0``, as the leaves of a list are called."""
    passed = set(taken)
    while True:
        name = unique(base, passed)
        made = [name] if count == 1 else [f"{name}.{place}" for place in range(count)]
        if not taken.intersection(made):
            return name, made
        passed.add(name)


def _only_stacked(draft: Draft) -> set[Value]:
    """Parameters that are read as the layers of blocks; they belong to the instances."""
    stacked: set[Value] = set()
    plain: set[Value] = set()
    for node in draft.nodes:
        split = _split(node) if node.kind == "scan" else len(node.inputs)
        plain.update(node.values[:split])
        stacked.update(node.values[split:])
    return stacked - plain


def _split(node: Node) -> int:
    """How many operands of a scan come before its stacked parameters."""
    return int(node.attrs["consts"]) + int(node.attrs["carries"])
