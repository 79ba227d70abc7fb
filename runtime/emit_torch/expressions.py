"""Each op kind as Python: the expression of one rank's part of an op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.runtime.emit_torch import shapes
from autopar.runtime.emit_torch.generic import generic
from autopar.runtime.emit_torch.site import EmitError, Site
from autopar.runtime.emit_torch.text import (
    AND,
    COMPARE,
    OR,
    PRODUCT,
    SUM,
    UNARY,
    XOR,
    Expr,
    call,
    literal,
    tuple_text,
)

Printer = Callable[[Site], Expr]

HEAVY = 2  # weight of an op that a reader looks at by itself: a product, a norm, a call
LIGHT = 1


def expression(site: Site) -> Expr:
    """The expression for all results of ``site`` (a tuple where there are several)."""
    printer = PRINTERS.get(site.kind)
    found = printer(site) if printer is not None else generic(site)
    reads = frozenset().union(*(a.reads for a in site.args), found.reads)
    if site.bias is not None:
        reads |= site.bias.reads
    weight = sum(a.weight for a in site.args) + found.weight
    return Expr(found.text, found.level, reads, weight)


def dtype(name: str) -> str:
    """``float32`` is the variable that verification lifts."""
    return "FP32" if name == "float32" else f"torch.{name}"


# -- products and lookups ------------------------------------------------------------------------


def _linear(site: Site) -> Expr:
    x, weight = site.args[0].text, site.args[1]
    if site.kind == "linear_t":
        if site.bias is None:
            return Expr(f"{site.args[0].within(PRODUCT)} @ {weight.atom}", PRODUCT, weight=HEAVY)
        weight = Expr(f"{weight.atom}.t()")
    arguments = [x, weight.text, *([site.bias.text] if site.bias is not None else [])]
    return Expr(call("F.linear", arguments), weight=HEAVY)


def _matmul(site: Site) -> Expr:
    left, right = site.args
    text = f"{left.within(PRODUCT)} @ {right.within(UNARY)}"
    return Expr(text, PRODUCT, weight=HEAVY)


def _einsum(site: Site) -> Expr:
    equation = literal(site.attrs["equation"])
    return Expr(call("torch.einsum", [equation, *(a.text for a in site.args)]), weight=HEAVY)


def _conv(site: Site) -> Expr:
    spatial = len(site.whole(0)) - 2
    arguments = [a.text for a in site.args]
    if site.bias is not None:
        arguments.append(site.bias.text)
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = _same(site.attrs.get(name, default))
        if value != default:
            arguments.append(f"{name}={literal(value)}")
    if site.attrs.get("groups", 1) != 1:
        # Channels of this rank over channels of one group: right for split groups too.
        groups = site.operand(0)[1] // site.operand(1)[1]
        if groups != 1:
            arguments.append(f"groups={groups}")
    return Expr(call(f"F.conv{spatial}d", arguments), weight=HEAVY)


def _same(value: Any) -> Any:
    """``(1, 1)`` as 1: torch takes one number for all spatial dims."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(set(value)) == 1:
        return value[0]
    return value


def _embedding(site: Site) -> Expr:
    ids, weight = site.args[0].text, site.args[1].text
    padding = site.attrs.get("padding_idx")
    padding = None if padding is not None and padding < 0 else padding
    given = [f"padding_idx={padding}"] if padding is not None else []
    axes = site.axes_on(1, 0)
    if not axes:
        return Expr(call("F.embedding", [ids, weight, *given]), weight=HEAVY)
    rows = f"vocabulary={site.whole(1)[0]}"
    where = _axis(axes)
    return Expr(call("embedding", [ids, weight, rows, where, *given]), weight=HEAVY)


def _axis(axes: tuple[str, ...]) -> str:
    return f"axis={literal(axes[0] if len(axes) == 1 else axes)}"


def _cross_entropy(site: Site) -> Expr:
    reduction = site.attrs.get("reduction", "mean")
    logits, labels = site.args[0].text, site.args[1].text
    given = []
    if reduction == "mean":
        given.append(f"count={site.count}")
    elif reduction == "none":
        given.append("count=None")
    if site.attrs.get("ignore_index", -100) != -100:
        given.append(f"ignore_index={site.attrs['ignore_index']}")
    if site.attrs.get("label_smoothing", 0.0):
        given.append(f"label_smoothing={site.attrs['label_smoothing']}")
    axes = site.axes_on(0, 1)
    if axes:
        if len(site.whole(1)) != 1:
            raise EmitError(f"{site.at.op.name}: labels that are probabilities need whole rows")
        given += [f"vocabulary={site.whole(0)[1]}", _axis(axes)]
    return Expr(call("cross_entropy", [logits, labels, *given]), weight=HEAVY)


# -- attention and norms -------------------------------------------------------------------------


def _attention(site: Site) -> Expr:
    arguments = [a.text for a in site.args[:3]]
    if len(site.args) > 3:
        arguments.append(f"mask={site.args[3].text}")
    if site.attrs.get("causal"):
        arguments.append("causal=True")
    if site.attrs.get("scale") is not None:
        arguments.append(f"scale={literal(site.attrs['scale'])}")
    if site.attrs.get("dropout_p"):
        arguments.append(f"dropout={literal(site.attrs['dropout_p'])} * self.training")
    return Expr(call("attention", arguments), weight=HEAVY)


def _rotary(site: Site) -> Expr:
    return Expr(call("rotary", [a.text for a in site.args]), weight=HEAVY)


def _repeat_heads(site: Site) -> Expr:
    repeats = site.result()[1] // site.operand(0)[1]
    return Expr(call("repeat_heads", [site.args[0].text, str(repeats)]), weight=LIGHT)


def _layer_norm(site: Site) -> Expr:
    trailing = site.operand(0)[-int(site.attrs.get("dims", 1)) :]
    arguments = [site.args[0].text, tuple_text(trailing), *(a.text for a in site.args[1:])]
    eps = float(site.attrs.get("eps", 1e-5))
    if eps != 1e-5:
        arguments.append(literal(eps) if len(site.args) == 3 else f"eps={literal(eps)}")
    return Expr(call("F.layer_norm", arguments), weight=HEAVY)


def _rms_norm(site: Site) -> Expr:
    weight = site.args[1].text if len(site.args) > 1 else "None"
    arguments = [site.args[0].text, weight, literal(float(site.attrs["eps"]))]
    if site.attrs.get("scale_offset"):
        arguments.append(f"offset={literal(float(site.attrs['scale_offset']))}")
    return Expr(call("rms_norm", arguments), weight=HEAVY)


def _group_norm(site: Site) -> Expr:
    groups = int(site.attrs["groups"]) * site.operand(0)[1] // site.whole(0)[1]
    arguments = [site.args[0].text, str(groups), *(a.text for a in site.args[1:])]
    eps = float(site.attrs.get("eps", 1e-5))
    if eps != 1e-5:
        arguments.append(f"eps={literal(eps)}")
    return Expr(call("F.group_norm", arguments), weight=HEAVY)


def _batch_norm(site: Site) -> Expr:
    arguments = [a.text for a in site.args]
    training = bool(site.attrs.get("training", True))
    momentum = site.attrs.get("momentum", 0.1)
    eps = float(site.attrs.get("eps", 1e-5))
    if momentum != 0.1 and training:
        arguments.append(f"momentum={literal(momentum)}")
    if eps != 1e-5:
        arguments.append(f"eps={literal(eps)}")
    if not training:
        arguments.append("training=False")
        return Expr(call("batch_norm", arguments), weight=HEAVY)
    if any(o.steps for o in site.at.operands if site.role(o.name) == "buffer"):
        raise EmitError(f"{site.at.op.name}: running statistics must be stored as they are used")
    split = site.at.operands[0].wanted
    axes = [
        a for a, p in split.placements if p.kind == "S" and p.dim != 1 and site.mesh.size(a) > 1
    ]
    if "microbatch" in axes:
        raise EmitError(f"{site.at.op.name}: batch statistics cannot go over microbatches")
    if axes:
        arguments.append(f"axes={tuple_text(axes)}")
    return Expr(call("batch_norm", arguments), weight=HEAVY)


def _softmax(site: Site) -> Expr:
    arguments = [site.args[0].text, f"dim={site.attrs.get('dim', -1)}"]
    if site.attrs.get("dtype") is not None:
        arguments.append(f"dtype={dtype(site.attrs['dtype'])}")
    return Expr(call(f"F.{site.kind}", arguments), weight=HEAVY)


# -- elementwise ---------------------------------------------------------------------------------

_INFIX: Mapping[str, tuple[str, int]] = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "remainder": ("%", PRODUCT),
    "floor_divide": ("//", PRODUCT),
    "and": ("&", AND),
    "xor": ("^", XOR),
    "or": ("|", OR),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}


def operands(site: Site) -> tuple[Expr, Expr]:
    """Left and right side of an op of two, one of which may be a scalar."""
    if len(site.args) == 2:
        return site.args[0], site.args[1]
    value = site.attrs["other"]
    text = literal(value)
    scalar = Expr(text, UNARY if text.startswith("-") else Expr("").level)
    if site.attrs.get("scalar_first"):
        return scalar, site.args[0]
    return site.args[0], scalar


def _infix(site: Site) -> Expr:
    sign, level = _INFIX[site.kind]
    left, right = operands(site)
    if site.attrs.get("alpha", 1) != 1:
        alpha = literal(site.attrs["alpha"])
        right = Expr(f"{alpha} * {right.within(PRODUCT + 1)}", PRODUCT)
    # Comparisons do not chain: both sides must bind tighter.
    outer = level + 1 if level == COMPARE else level
    return Expr(f"{left.within(outer)} {sign} {right.within(level + 1)}", level, weight=LIGHT)


def _pow(site: Site) -> Expr:
    left, right = operands(site)
    if site.attrs.get("scalar_first"):
        return Expr(call("torch.pow", [left.text, right.text]), weight=LIGHT)
    return Expr(f"{left.atom}.pow({right.text})", weight=LIGHT)


def _extreme(site: Site) -> Expr:
    left, right = operands(site)
    if len(site.args) == 1:
        bound = "min" if site.kind == "maximum" else "max"
        tensor, scalar = (right, left) if site.attrs.get("scalar_first") else (left, right)
        return Expr(f"{tensor.atom}.clamp({bound}={scalar.text})", weight=LIGHT)
    return Expr(call(f"torch.{site.kind}", [left.text, right.text]), weight=LIGHT)


_METHODS = (
    "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "abs", "erf", "square",
    "reciprocal", "detach", "isinf", "isnan", "sign", "floor",
)  # fmt: skip
# Functions of torch.nn.functional with the attrs that they take, and torch's defaults.
_FUNCTIONS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "relu": (),
    "gelu": (("approximate", "none"),),
    "silu": (),
    "mish": (),
    "softplus": (("beta", 1), ("threshold", 20)),
    "leaky_relu": (("negative_slope", 0.01),),
    "elu": (("alpha", 1.0),),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
}


def _method(site: Site) -> Expr:
    return Expr(f"{site.args[0].atom}.{site.kind}()", weight=LIGHT)


def _function(site: Site) -> Expr:
    arguments = [site.args[0].text]
    for name, default in _FUNCTIONS[site.kind]:
        value = site.attrs.get(name, default)
        if value != default:
            arguments.append(f"{name}={literal(value)}")
    return Expr(call(f"F.{site.kind}", arguments), weight=LIGHT)


def _neg(site: Site) -> Expr:
    return Expr(f"-{site.args[0].within(UNARY)}", UNARY, weight=LIGHT)


def _not(site: Site) -> Expr:
    return Expr(f"~{site.args[0].within(UNARY)}", UNARY, weight=LIGHT)


def _identity(site: Site) -> Expr:
    return Expr(site.args[0].text, site.args[0].level)


def _clamp(site: Site) -> Expr:
    bounds = [
        f"{n}={literal(site.attrs[n])}" for n in ("min", "max") if site.attrs.get(n) is not None
    ]
    return Expr(f"{site.args[0].atom}.clamp({', '.join(bounds)})", weight=LIGHT)


def _cast(site: Site) -> Expr:
    return Expr(f"{site.args[0].atom}.to({dtype(site.attrs['dtype'])})", weight=LIGHT)


def _where(site: Site) -> Expr:
    rest = list(site.args[1:])
    sides = []
    for name in ("a", "b"):
        value = site.attrs.get(name)
        sides.append(rest.pop(0).text if value is None and rest else literal(value))
    return Expr(call("torch.where", [site.args[0].text, *sides]), weight=LIGHT)


def _masked_fill(site: Site) -> Expr:
    value = site.args[2].text if len(site.args) > 2 else literal(site.attrs["value"])
    return Expr(f"{site.args[0].atom}.masked_fill({site.args[1].text}, {value})", weight=LIGHT)


def _dropout(site: Site) -> Expr:
    if not site.attrs.get("p"):
        return _identity(site)
    rate = literal(float(site.attrs["p"]))
    return Expr(f"F.dropout({site.args[0].text}, {rate}, self.training)", weight=LIGHT)


# -- reductions and factories --------------------------------------------------------------------


def _dims(site: Site) -> tuple[int, ...]:
    rank = len(site.whole(0))
    value = site.attrs.get("dims", site.attrs.get("dim"))
    if value is None or value == ():
        return tuple(range(rank))
    if isinstance(value, int):
        value = (value,)
    return tuple(sorted(d % rank for d in value))


def _reduction(site: Site) -> Expr:
    dims = _dims(site)
    rank = len(site.whole(0))
    name = "sum" if site.kind == "mean" and site.splits(0, dims) else site.kind
    keep = bool(site.attrs.get("keepdim"))
    arguments: list[str] = []
    if len(dims) < rank or keep or name == "var":
        arguments.append(str(dims[0]) if len(dims) == 1 else tuple_text(dims))
    if name == "var" and site.attrs.get("correction", 1) != 1:
        arguments.append(f"correction={site.attrs['correction']}")
    if keep:
        arguments.append("keepdim=True")
    text = f"{site.args[0].atom}.{name}({', '.join(arguments)})"
    if name == site.kind:
        return Expr(text, weight=LIGHT)
    count = math.prod(site.whole(0)[d] for d in dims)
    return Expr(f"{text} / {count}", PRODUCT, weight=LIGHT)


def _arg(site: Site) -> Expr:
    dim = site.attrs.get("dim")
    arguments = [] if dim is None else [str(dim)]
    if dim is not None and site.attrs.get("keepdim"):
        arguments.append("keepdim=True")
    return Expr(f"{site.args[0].atom}.{site.kind}({', '.join(arguments)})", weight=LIGHT)


def _full(site: Site) -> Expr:
    value = literal(site.attrs["value"])
    made = [tuple_text(site.sizes()), value, f"dtype={dtype(site.attrs['dtype'])}"]
    return Expr(call("torch.full", [*made, "device=device()"]), weight=LIGHT)


def _arange(site: Site) -> Expr:
    start, stop = site.attrs.get("start", 0) or 0, site.attrs["stop"]
    step = site.attrs.get("step", 1)
    step = 1 if step is None else step
    bounds = [literal(stop)] if start == 0 and step == 1 else [literal(start), literal(stop)]
    if step != 1:
        bounds.append(literal(step))
    name = site.attrs.get("dtype", "int64")
    if name != "int64":
        bounds.append(f"dtype={dtype(name)}")
    return Expr(call("torch.arange", [*bounds, "device=device()"]), weight=LIGHT)


def _constant(site: Site) -> Expr:
    made = [literal(site.attrs["value"]), f"dtype={dtype(site.attrs['dtype'])}"]
    return Expr(call("torch.tensor", [*made, "device=device()"]), weight=LIGHT)


def _triangle(site: Site) -> Expr:
    diagonal = site.attrs.get("diagonal", 0)
    given = f"{diagonal}" if diagonal else ""
    return Expr(f"{site.args[0].atom}.{site.kind}({given})", weight=LIGHT)


PRINTERS: Mapping[str, Printer] = {
    "linear": _linear,
    "linear_t": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "conv": _conv,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "rotary": _rotary,
    "repeat_heads": _repeat_heads,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "log_softmax": _softmax,
    **dict.fromkeys(_INFIX, _infix),
    "pow": _pow,
    "maximum": _extreme,
    "minimum": _extreme,
    **dict.fromkeys(_METHODS, _method),
    **dict.fromkeys(_FUNCTIONS, _function),
    "neg": _neg,
    "not": _not,
    "identity": _identity,
    "clamp": _clamp,
    "cast": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
    "dropout": _dropout,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "var"), _reduction),
    "argmax": _arg,
    "full": _full,
    "arange": _arange,
    "constant": _constant,
    "tril": _triangle,
    "triu": _triangle,
    **shapes.PRINTERS,
}
