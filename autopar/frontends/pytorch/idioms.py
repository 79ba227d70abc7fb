"""Idioms that libraries write out in small ops, lifted to the kind that means them.

Every function looks at one node, the last of an idiom, and returns the node that takes its place,
or None. What only the idiom read dies afterwards with the other dead nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.frontends.pytorch.ir import Links, Node, Value


def lift_idioms(nodes: list[Node], results: list[Value]) -> list[Node]:
    """``nodes`` with idioms replaced, one kind of idiom after the other."""
    for idiom in (repeated_heads, rotary, rms_norm, gelu, silu, wide_softmax, wide_loss, grouped):
        links = Links(nodes, results)
        out = []
        for node in nodes:
            made = idiom(node, links) if len(node.outputs) == 1 else None
            if made is not None:
                made.outputs, made.source, made.grad = node.outputs, node.source, node.grad
            out.append(made or node)
        nodes = out
    return nodes


def _operands(node: Node) -> Iterator[tuple[Value, Value]]:
    """Both orders of a commutative op's two operands."""
    if len(node.inputs) == 2:
        yield node.inputs[0], node.inputs[1]
        yield node.inputs[1], node.inputs[0]


def _scaled(node: Node | None, kind: str, number: float) -> bool:
    """Whether ``node`` is ``kind`` with the scalar ``number``, which an order has behind it."""
    if node is None or node.kind != kind:
        return False
    turned = node.attrs.get("scalar_first") and kind not in ("add", "mul")  # 3 ** x, not x ** 3
    other = None if turned else node.attrs.get("other")
    return isinstance(other, int | float) and math.isclose(other, number, rel_tol=1e-7)


# -- attention ------------------------------------------------------------------------------------


def repeated_heads(node: Node, links: Links) -> Node | None:
    """[b, g, t, d] -> [b, g, 1, t, d] -> [b, g, r, t, d] -> [b, g r, t, d]."""
    if node.kind != "reshape":
        return None
    spread = links.made_by(node.inputs[0], "expand")
    apart = spread and links.made_by(spread.inputs[0], "reshape")
    if spread is None or apart is None or len(apart.inputs[0].shape) != 4:
        return None
    x, wide = apart.inputs[0], spread.output.shape
    b, g, t, d = x.shape
    if len(wide) != 5 or wide != (b, g, wide[2], t, d) or apart.output.shape != (b, g, 1, t, d):
        return None
    if node.output.shape != (b, g * wide[2], t, d):
        return None
    return Node("repeat_heads", [x], [], {"repeats": wide[2]})


def grouped(node: Node, links: Links) -> Node | None:
    """Attention repeats key and value heads itself."""
    if node.kind != "attention":
        return None
    k, v = (links.made_by(x, "repeat_heads") for x in node.inputs[1:3])
    if k is None or v is None or k.attrs != v.attrs:
        return None
    return Node("attention", [node.inputs[0], *k.inputs, *v.inputs, *node.inputs[3:]], [],
                node.attrs)  # fmt: skip


def rotary(node: Node, links: Links) -> Node | None:
    """``x * cos + cat(-x[..., d/2:], x[..., :d/2]) * sin``."""
    if node.kind != "add":
        return None
    for left, right in _operands(node):
        plain, turned = links.made_by(left, "mul"), links.made_by(right, "mul")
        if plain is None or turned is None:
            continue
        for x, cos in _operands(plain):
            if len(x.shape) != 4 or x.shape != node.output.shape:
                continue
            for quarter, sin in _operands(turned):
                halves = links.made_by(quarter, "cat")
                if halves is None or not _is_quarter_turn(halves, x, links):
                    continue
                tables = [_table(t, x, links) for t in (cos, sin)]
                if None not in tables and node.output.dtype == x.dtype:
                    inputs = [x, *(t for t in tables if t is not None)]
                    return Node("rotary", inputs, [], {"style": "half"})
    return None


def _is_quarter_turn(halves: Node, x: Value, links: Links) -> bool:
    width = x.shape[-1]
    if halves.attrs["dim"] != 3 or len(halves.inputs) != 2 or width % 2:
        return False
    negative = links.made_by(halves.inputs[0], "neg")
    if negative is None:
        return False
    half = width // 2
    second = _is_part(negative.inputs[0], x, half, width, links)
    return second and _is_part(halves.inputs[1], x, 0, half, links)


def _is_part(value: Value, x: Value, start: int, stop: int, links: Links) -> bool:
    """Whether ``value`` is ``x[..., start:stop]``, by a slice or by a split in two."""
    node = links.made_by(value, "slice", "split")
    if node is None or node.inputs[0] is not x or node.attrs["dim"] != 3:
        return False
    if node.kind == "slice":
        return (node.attrs["start"], node.attrs["stop"], node.attrs["step"]) == (start, stop, 1)
    before = sum(node.attrs["sizes"][: node.outputs.index(value)])
    return before == start and value.shape[3] == stop - start and not node.attrs.get("squeeze")


def _table(value: Value, x: Value, links: Links) -> Value | None:
    """The [b or 1, s, d] table behind ``table[:, None]``."""
    node = links.made_by(value, "reshape")
    if node is None or len(value.shape) != 4 or value.shape[1] != 1:
        return None
    table = node.inputs[0]
    rows = (value.shape[0], *value.shape[2:])
    fits = rows[1:] == x.shape[2:] and rows[0] in (1, x.shape[0])
    return table if table.shape == rows and fits else None


# -- norms ----------------------------------------------------------------------------------------


def rms_norm(node: Node, links: Links) -> Node | None:
    """``x * rsqrt(mean(x ** 2) + eps)`` in float32, scaled by ``weight`` or ``1 + weight``.

    ``weight_first`` says that the weight is applied before the cast back.
    """
    norm = _scaled_norm(node, links)
    if norm is None:
        return None
    x, weight, attrs = norm
    return Node("rms_norm", [x, *([weight] if weight is not None else [])], [], attrs)


Norm = tuple[Value, Value | None, dict[str, object]]


def _scaled_norm(node: Node, links: Links) -> Norm | None:
    if node.kind == "cast":  # the weight first, the cast last (olmo2, gemma)
        inner = links.made_by(node.inputs[0], "mul")
        norm = inner and _weighted(inner, links)
        if inner is None or not norm or not links.only(inner.output):
            return None
        x, weight, attrs = norm
        return (x, weight, attrs) if node.output.dtype == x.dtype else None
    if node.kind != "mul":
        return None
    reader = links.readers.get(node.output, [])
    if len(reader) == 1 and reader[0].kind == "cast" and _weighted(node, links):
        return None  # the cast after it is part of the idiom
    norm = _weighted(node, links)
    return norm if norm and node.output.dtype == norm[0].dtype else None


def _weighted(node: Node, links: Links) -> Norm | None:
    """``norm * weight``, where the norm may have been cast back before."""
    for body, scale in _operands(node):
        weight, offset = _weight(scale, links)
        if weight is None or len(weight.shape) != 1:
            continue
        back = links.made_by(body, "cast")
        inner = links.made_by(back.inputs[0] if back else body, "mul")
        core = inner and _core(inner, links)
        if core is None or not core:
            continue
        x, eps, upcast = core
        if weight.shape != x.shape[-1:] or (back and back.output.dtype != x.dtype):
            continue
        attrs: dict[str, object] = {"eps": eps, "upcast": upcast, "scale_offset": offset}
        if back is None and upcast:
            attrs["weight_first"] = True
        return x, weight, attrs
    return None


def _weight(value: Value, links: Links) -> tuple[Value | None, int]:
    node = links.made_by(value, "add")
    if node is not None and len(node.inputs) == 1 and node.attrs.get("other") == 1:
        cast = links.made_by(node.inputs[0], "cast")
        inner = cast.inputs[0] if cast else node.inputs[0]
        return (inner, 1) if inner.role in ("parameter", "buffer") else (None, 0)
    cast = links.made_by(value, "cast")
    inner = cast.inputs[0] if cast else value
    return (inner, 0) if inner.role in ("parameter", "buffer") else (None, 0)


def _core(node: Node, links: Links) -> tuple[Value, float, bool] | None:
    """(x, eps, upcast) of ``x * rsqrt(mean(x ** 2) + eps)``."""
    for x, root in _operands(node):
        eps = _root_mean_square(root, x, links)
        if eps is None:
            continue
        number, squared = eps
        cast = links.made_by(squared, "cast")
        plain = cast.inputs[0] if cast else squared
        if x is squared or x is plain:
            return plain, number, cast is not None
    return None


def _root_mean_square(root: Value, x: Value, links: Links) -> tuple[float, Value] | None:
    """(eps, what is squared) if ``root`` is ``1 / sqrt(mean(squared ** 2) + eps)``."""
    turned = links.made_by(root, "rsqrt", "pow")
    if turned is None or (turned.kind == "pow" and not _scaled(turned, "pow", -0.5)):
        return None
    plus = links.made_by(turned.inputs[0], "add")
    if plus is None or len(plus.inputs) != 1:
        return None
    mean = links.made_by(plus.inputs[0], "mean")
    if mean is None or mean.attrs["dims"] != (len(x.shape) - 1,) or not mean.attrs["keepdim"]:
        return None
    square = links.made_by(mean.inputs[0], "pow", "square", "mul")
    if square is None or (square.kind == "pow" and not _scaled(square, "pow", 2)):
        return None
    if square.kind == "mul" and (len(square.inputs) != 2 or square.inputs[0] != square.inputs[1]):
        return None
    return float(plus.attrs["other"]), square.inputs[0]


# -- activations ----------------------------------------------------------------------------------


def gelu(node: Node, links: Links) -> Node | None:
    """``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``, or with erf."""
    if node.kind != "mul":
        return None
    for half, bracket in _operands(node):
        halved, plus = links.made_by(half, "mul"), links.made_by(bracket, "add")
        if not _scaled(halved, "mul", 0.5) or not _scaled(plus, "add", 1.0):
            continue
        assert halved is not None
        assert plus is not None
        x = halved.inputs[0]
        curve = links.made_by(plus.inputs[0], "tanh", "erf")
        if curve is None:
            continue
        if curve.kind == "tanh" and _is_cubic(curve.inputs[0], x, links):
            return Node("gelu", [x], [], {"approximate": "tanh"})
        if curve.kind == "erf" and _is_over_root_two(curve.inputs[0], x, links):
            return Node("gelu", [x], [], {"approximate": "none"})
    return None


def _is_cubic(value: Value, x: Value, links: Links) -> bool:
    scaled = links.made_by(value, "mul")
    if not _scaled(scaled, "mul", math.sqrt(2 / math.pi)) or scaled is None:
        return False
    total = links.made_by(scaled.inputs[0], "add")
    if total is None:
        return False
    for line, cube in _operands(total):
        times = links.made_by(cube, "mul")
        if line is x and _scaled(times, "mul", 0.044715) and times is not None:
            power = links.made_by(times.inputs[0], "pow")
            if _scaled(power, "pow", 3) and power is not None and power.inputs[0] is x:
                return True
    return False


def _is_over_root_two(value: Value, x: Value, links: Links) -> bool:
    node = links.made_by(value, "div", "mul")
    if node is None or node.inputs[0] is not x:
        return False
    return _scaled(node, "div", math.sqrt(2)) or _scaled(node, "mul", math.sqrt(0.5))


def silu(node: Node, links: Links) -> Node | None:
    """``x * sigmoid(x)``."""
    if node.kind != "mul":
        return None
    for x, gate in _operands(node):
        curve = links.made_by(gate, "sigmoid")
        if curve is not None and curve.inputs[0] is x:
            return Node("silu", [x], [], {})
    return None


# -- what float32 is asked for --------------------------------------------------------------------


def wide_softmax(node: Node, links: Links) -> Node | None:
    """A softmax after a cast to its own dtype asks for that dtype, whatever it is given."""
    if node.kind not in ("softmax", "log_softmax") or "dtype" in node.attrs:
        return None
    cast = links.made_by(node.inputs[0], "cast")
    if cast is None or cast.inputs[0].dtype != cast.output.dtype:
        return None
    return Node(node.kind, [cast.inputs[0]], [], {**node.attrs, "dtype": cast.output.dtype})


def wide_loss(node: Node, links: Links) -> Node | None:
    """A loss of logits that were cast to float32, though they are float32 here: ``upcast``."""
    if node.kind != "cross_entropy" or node.attrs.get("upcast"):
        return None
    logits = node.inputs[0]
    while (view := links.made_by(logits, "reshape", "slice")) is not None:
        logits = view.inputs[0]
    cast = links.made_by(logits, "cast")
    if cast is None or cast.inputs[0].dtype != cast.output.dtype:
        return None
    return Node("cross_entropy", node.inputs, [], {**node.attrs, "upcast": True})
