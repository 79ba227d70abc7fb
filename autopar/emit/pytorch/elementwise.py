"""Ops that work element by element as Python operators and methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.emit.constants import differing, literal
from autopar.emit.pytorch.site import HEAVY, LIGHT, Printer, Site, dtype
from autopar.emit.text import AND, COMPARE, OR, PRODUCT, SUM, UNARY, XOR, Expr, axis_argument, call

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
    scalar = site.constant(site.attrs["other"])
    if site.attrs.get("scalar_first"):
        return scalar, site.args[0]
    return site.args[0], scalar


def _infix(site: Site) -> Expr:
    sign, level = _INFIX[site.kind]
    left, right = operands(site)
    if site.attrs.get("alpha", 1) != 1:
        alpha = site.constant(site.attrs["alpha"])
        right = Expr(f"{alpha.within(PRODUCT)} * {right.within(PRODUCT + 1)}", PRODUCT)
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
_FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "relu": {},
    "gelu": {"approximate": "none"},
    "silu": {},
    "mish": {},
    "softplus": {"beta": 1, "threshold": 20},
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1.0},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
}


def _method(site: Site) -> Expr:
    return Expr(f"{site.args[0].atom}.{site.kind}()", weight=LIGHT)


def _function(site: Site) -> Expr:
    options = differing(site.attrs, _FUNCTIONS[site.kind])
    return Expr(call(f"F.{site.kind}", [site.args[0].text, *options]), weight=LIGHT)


def _neg(site: Site) -> Expr:
    return Expr(f"-{site.args[0].within(UNARY)}", UNARY, weight=LIGHT)


def _not(site: Site) -> Expr:
    return Expr(f"~{site.args[0].within(UNARY)}", UNARY, weight=LIGHT)


def _identity(site: Site) -> Expr:
    return Expr(site.args[0].text, site.args[0].level)


def _clamp(site: Site) -> Expr:
    bounds = [
        f"{n}={site.number(site.attrs[n])}" for n in ("min", "max") if site.attrs.get(n) is not None
    ]
    return Expr(f"{site.args[0].atom}.clamp({', '.join(bounds)})", weight=LIGHT)


def _cast(site: Site) -> Expr:
    return Expr(f"{site.args[0].atom}.to({dtype(site.attrs['dtype'])})", weight=LIGHT)


def _where(site: Site) -> Expr:
    rest = list(site.args[1:])
    sides = []
    for name in ("a", "b"):
        value = site.attrs.get(name)
        sides.append(rest.pop(0).text if value is None and rest else site.number(value))
    return Expr(call("torch.where", [site.args[0].text, *sides]), weight=LIGHT)


def _masked_fill(site: Site) -> Expr:
    value = site.args[2].text if len(site.args) > 2 else site.number(site.attrs["value"])
    return Expr(f"{site.args[0].atom}.masked_fill({site.args[1].text}, {value})", weight=LIGHT)


def _dropout(site: Site) -> Expr:
    if not site.attrs.get("p"):
        return _identity(site)
    rate, features = literal(float(site.attrs["p"])), bool(site.attrs.get("features"))
    alpha = bool(site.attrs.get("alpha"))
    apart = site.drawn_apart(dims=2 if features else None)
    if apart:
        given = [rate, "self.training", axis_argument(apart)]
        given += ["features=True"] if features else []
        given += ["alpha=True"] if alpha else []
        return Expr(call("dropout", [site.args[0].text, *given]), weight=LIGHT)
    name, spatial = "F.dropout", len(site.whole(0)) - 2
    if alpha:
        name = "F.feature_alpha_dropout" if features else "F.alpha_dropout"
    elif features:
        name = f"F.dropout{spatial}d" if spatial <= 3 else "torch.feature_dropout"
    return Expr(f"{name}({site.args[0].text}, {rate}, self.training)", weight=LIGHT)


def _gated(site: Site) -> Expr:
    arguments = [a.text for a in site.args]
    if site.attrs["activation"] != "silu":
        arguments.append(f'"{site.attrs["activation"]}"')
    arguments.append(f'kernel="{site.attrs["kernel"]}"')
    return Expr(call("gated_activation", arguments), weight=HEAVY)


PRINTERS: Mapping[str, Printer] = {
    "gated_activation": _gated,
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
}
