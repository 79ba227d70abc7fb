"""Naming every tensor and writing the program down as a `Graph`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.frontends.pytorch.gradients import Gradients, Variant
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.program import Body, Program
from autopar.frontends.pytorch.public_calls import with_public
from autopar.nouns.graph import Block, Graph, Op, Tensor

STEP = "step"
"""Where the block of a layer stands whose tensors are handed to each call, below the layer."""


def assemble(program: Program, gradients: Gradients, unread: Sequence[Value] = ()) -> Graph:
    """The graph: one block per variant of a body, named after the layer's class.

    ``unread`` are parameters that no op reads: they are held beside those of their layer.
    """
    names = _block_names(program, gradients)
    blocks: dict[str, Block] = {}
    steps = _fresh()
    rest = {v.name: v for v in unread}
    for variant, name in names.items():
        body = program.bodies[variant[0]]
        calls = [c for c in program.nodes if gradients.of_call.get(c) == variant]
        if _is_lent(body):
            step = steps(f"{body.path}.{STEP}")
            for call in calls:
                call.attrs["instance"] = step
        instances = tuple(c.attrs["instance"] for c in calls)
        own = _below(instances, rest)
        graph = _body(body, gradients.variants[variant], own)
        blocks[name] = Block(name, graph, instances)
    scope = _Scope("", gradients.top)
    scope.keep({v: v.name for v in (*rest.values(), *_own(program.nodes))})
    for value in rest.values():
        scope.declare(value, value.name, value.role)
    for value in program.inputs:
        scope.declare(value, value.name, "input")
    ops = []
    for node in program.nodes:
        if node.kind == "call":
            block, instance = names[gradients.of_call[node]], node.attrs["instance"]
            attrs = {"block": block, "instance": instance}
            ops.append(scope.op(node, f"{instance}/block", "block", attrs))
        else:
            ops.append(scope.op(node))
    scope.rename_role(program.result, "output")
    return Graph(
        tensors=scope.tensors(),
        ops=tuple(ops),
        inputs=tuple(scope.names[v] for v in program.inputs),
        outputs=(scope.names[program.result],),
        blocks=blocks,
    )


def _is_lent(body: Body) -> bool:
    """Whether tensors of the layer are handed to each call, held by what is around it."""
    return any(name.startswith(f"{body.path}.") for name in body.names)


def _below(instances: Sequence[str], unread: dict[str, Value]) -> list[Value]:
    """Takes the parameters below ``instances`` out of ``unread``; those of the first are given,
    named relative to it. All instances are built alike, and so have the same."""
    values: list[Value] = []
    for place, instance in enumerate(dict.fromkeys(instances)):
        for name in [n for n in unread if n.startswith(f"{instance}.")]:
            value = unread.pop(name)
            if place == 0:
                short = name.removeprefix(f"{instance}.")
                values.append(Value(value.shape, value.dtype, value.role, short))
    return values


def _block_names(program: Program, gradients: Gradients) -> dict[Variant, str]:
    """In order of first call: ``LlamaDecoderLayer``, the next of that class with ``_1``."""
    fresh = _fresh()
    names: dict[Variant, str] = {}
    for node in program.nodes:
        variant = gradients.of_call.get(node)
        if variant is not None and variant not in names:
            names[variant] = fresh(program.bodies[variant[0]].class_name)
    return names


def _body(body: Body, differentiable: set[Value], unread: Sequence[Value]) -> Graph:
    scope = _Scope(body.path, differentiable)
    scope.keep({v: v.name for v in unread})
    scope.keep({v: v.name.removeprefix(f"{body.path}.") for v in _own(body.nodes)})
    for value in unread:
        scope.declare(value, value.name, value.role)
    for value, name in zip(body.entries, body.names, strict=True):
        scope.declare(value, name.removeprefix(f"{body.path}."), "input")
    ops = tuple(scope.op(node) for node in body.nodes)
    for value in body.exits:
        scope.rename_role(value, "output")
    return Graph(
        tensors=scope.tensors(),
        ops=ops,
        inputs=tuple(scope.names[v] for v in body.entries),
        outputs=tuple(scope.names[v] for v in body.exits),
    )


def _own(nodes: Iterable[Node]) -> Iterator[Value]:
    """The model's own tensors that nodes read."""
    return (v for node in nodes for v in node.inputs if v.role in ("parameter", "buffer"))


class _Scope:
    """The names of one graph; ``path`` is the instance that they are relative to."""

    def __init__(self, path: str, differentiable: set[Value]) -> None:
        self.path = path
        self.names: dict[Value, str] = {}
        self._roles: dict[Value, str] = {}
        self._differentiable = differentiable
        self._fresh = _fresh()
        self._kept: dict[Value, str] = {}

    def keep(self, names: Mapping[Value, str]) -> None:
        """The model's tensors bear their own names in programs too, whatever ops are called."""
        for value, name in names.items():
            self._kept[value] = self._fresh(name)

    def declare(self, value: Value, name: str, role: str) -> None:
        self.names[value] = self._kept.get(value) or self._fresh(name)
        self._roles[value] = role

    def rename_role(self, value: Value, role: str) -> None:
        if self._roles[value] == "activation":
            self._roles[value] = role

    def op(
        self, node: Node, name: str = "", kind: str = "", attrs: Mapping[str, object] | None = None
    ) -> Op:
        for value in node.inputs:
            if value not in self.names:  # the model's own tensors, when first read
                self.declare(value, self._relative(value.name), value.role)
        kind = kind or node.kind
        name = name or self._op_name(node)
        if len(node.outputs) == 1:
            self.declare(node.output, name, "activation")
        else:
            name = self._fresh(name)
            for place, value in enumerate(node.outputs):
                self.declare(value, f"{name}.{place}", "activation")
        source = node.source
        return Op(
            kind,
            tuple(self.names[v] for v in node.inputs),
            tuple(self.names[v] for v in node.outputs),
            _attrs(node) if attrs is None else dict(attrs),
            replace(source, module=self._relative(source.module)),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: Tensor(name, v.shape, v.dtype, self._roles[v], v in self._differentiable)  # type: ignore[arg-type]
            for v, name in self.names.items()
        }

    def _op_name(self, node: Node) -> str:
        module = self._relative(node.source.module)
        kind = node.kind.replace("::", ".")
        return f"{module}/{kind}" if module else kind

    def _relative(self, path: str) -> str:
        if not self.path:
            return path
        if path == self.path:
            return ""
        return path.removeprefix(f"{self.path}.")


def _attrs(node: Node) -> dict[str, Any]:
    """Those of a node; an op without a kind of its own is printed by its public call."""
    return with_public(node.attrs) if "::" in node.kind else dict(node.attrs)


def _fresh() -> Callable[[str], str]:
    taken: set[str] = set()

    def fresh(name: str) -> str:
        unused, count = name, 0
        while unused in taken:
            count += 1
            unused = f"{name}_{count}"
        taken.add(unused)
        return unused

    return fresh
