"""Through which values of a draft the gradient of the loss flows."""

from __future__ import annotations

from autopar.frontends.jax.draft import Draft, Node, Operand, Value
from autopar.nouns.kinds import SCAN, UNGRADED

STOPS = frozenset(
    ("detach", "sign", "floor", "jax::is_finite", "one_hot", "argmax", "jax::argmin", "jax::rint")
)


def differentiable(draft: Draft) -> set[Value]:
    """Values that depend on a floating-point parameter and on which the first result, the loss,
    depends, both through ops that have derivatives. Values inside bodies of scans are among
    them."""
    depends: set[Value] = set()
    _forward(draft, depends)
    reaches: set[Value] = set()
    _backward(draft, {v for v in draft.outputs[:1] if isinstance(v, Value)}, reaches)
    return depends & reaches


def is_float(value: Operand) -> bool:
    return "float" in value.dtype


def _forward(draft: Draft, reached: set[Value]) -> None:
    reached.update(
        v for v in draft.inputs if v.role == "parameter" and is_float(v) and not v.frozen
    )
    for node in draft.nodes:
        if node.kind == "scan":
            _scan_forward(node, reached)
        elif node.kind not in STOPS and any(v in reached for v in node.values):
            without = node.attrs[UNGRADED] if node.kind == SCAN else ()
            outs = (out for i, out in enumerate(node.outputs) if i not in without)
            reached.update(filter(is_float, outs))


def _scan_forward(node: Node, reached: set[Value]) -> None:
    body: Draft = node.attrs["body"]
    consts, carries = node.attrs["consts"], node.attrs["carries"]
    for inner, outer in zip(body.inputs, node.inputs, strict=True):
        if outer in reached:
            reached.add(inner)
    while True:  # what a carry depends on after one step, it depends on before the next
        _forward(body, reached)
        carried = zip(body.inputs[consts : consts + carries], body.outputs, strict=True)
        new = {i for i, o in carried if o in reached} - reached
        if not new:
            break
        reached.update(new)
    pairs = zip(node.outputs, body.outputs, body.inputs[consts : consts + carries], strict=True)
    reached.update(out for out, o, i in pairs if o in reached or i in reached)


def _backward(draft: Draft, results: set[Value], reached: set[Value]) -> None:
    reached.update(v for v in results if is_float(v))
    for node in reversed(draft.nodes):
        if not any(out in reached for out in node.outputs):
            continue
        if node.kind == "scan":
            _scan_backward(node, reached)
        elif node.kind not in STOPS:
            reached.update(v for v in node.values if is_float(v))


def _scan_backward(node: Node, reached: set[Value]) -> None:
    body: Draft = node.attrs["body"]
    consts, carries = node.attrs["consts"], node.attrs["carries"]
    wanted = {
        o
        for out, o in zip(node.outputs, body.outputs, strict=True)
        if out in reached and isinstance(o, Value)
    }
    while True:
        _backward(body, wanted, reached)
        carried = zip(body.inputs[consts : consts + carries], body.outputs, strict=True)
        new = {o for i, o in carried if i in reached and isinstance(o, Value)} - wanted
        if not new:
            break
        wanted |= new
    for inner, outer in zip(body.inputs, node.inputs, strict=True):
        if inner in reached and isinstance(outer, Value):
            reached.add(outer)
