"""Reductions, and tensors made from nothing, as Python."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.emit.constants import differing, holding, literal, same
from autopar.emit.pytorch.site import LIGHT, Printer, Site, dtype, model_part
from autopar.emit.sizes import Size, product
from autopar.emit.text import PRODUCT, Expr, call, tuple_text
from autopar.rules.implementations.table import GLOBAL_COUNT


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
    name = "sum" if GLOBAL_COUNT in site.at.implementations else site.kind
    keep = bool(site.attrs.get("keepdim"))
    over = str(dims[0]) if len(dims) == 1 else tuple_text(dims)
    arguments = holding({over: len(dims) < rank or keep or name == "var"})
    arguments += differing(site.attrs, {"correction": 1} if name == "var" else {})
    arguments += holding({"keepdim=True": keep})
    text = f"{site.args[0].atom}.{name}({', '.join(arguments)})"
    if site.attrs.get("one"):
        text = (
            f"{site.args[0].atom}.max({', '.join([over, *holding({'keepdim=True': keep})])}).values"
        )
    if name == site.kind:
        return Expr(text, weight=LIGHT)
    count = product(site.whole(0)[d] for d in dims)
    divisor = count.factor if isinstance(count, Size) else count
    return Expr(f"{text} / {divisor}", PRODUCT, weight=LIGHT)


def _arg(site: Site) -> Expr:
    dim = site.attrs.get("dim")
    arguments = [] if dim is None else [str(dim)]
    if dim is not None and site.attrs.get("keepdim"):
        arguments.append("keepdim=True")
    return Expr(f"{site.args[0].atom}.{site.kind}({', '.join(arguments)})", weight=LIGHT)


_FILLED = ((0, "torch.zeros"), (1, "torch.ones"))


def _full(site: Site) -> Expr:
    shape, kind = tuple_text(site.sizes()), f"dtype={dtype(site.attrs['dtype'])}"
    name = next((name for value, name in _FILLED if same(value, site.attrs["value"])), None)
    if name is not None:
        return Expr(call(name, [shape, kind, "device=device()"]), weight=LIGHT)
    made = [shape, site.number(site.attrs["value"]), kind, "device=device()"]
    return Expr(call("torch.full", made), weight=LIGHT)


def _band(site: Site) -> Expr:
    """What `autopar.emit.pytorch.masks` made of a comparison of rows with columns."""
    made = [tuple_text(site.sizes()), "dtype=torch.bool", "device=device()"]
    text = call("torch.ones", made)
    for name, bound in (("tril", site.attrs["upper"]), ("triu", site.attrs["lower"])):
        if bound is not None:
            text += f".{name}({bound or ''})"
    return Expr(text, weight=LIGHT)


def _arange(site: Site) -> Expr:
    start, stop = site.attrs.get("start", 0) or 0, site.attrs["stop"]
    step = site.attrs.get("step", 1)
    step = 1 if step is None else step
    if stop == site.result()[0]:
        (stop,) = site.result()
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


def _noise(site: Site) -> Expr:
    """Drawn whole on model axes, where all ranks draw the same, and cut: no stream of random
    numbers moves on further than another, and a program draws the same whatever its ``tp``."""
    made, cuts = list(site.result()), []
    lies = site.lowered.lie(site.at.op.outputs[0], site.at.results[0])
    for axis, placement in model_part(lies).placements:
        if placement.kind == "S":
            made[placement.dim] *= site.mesh.size(axis)
            order = ['order="zigzag"'] if placement.zigzag else []
            cuts.append([f"dim={placement.dim}", f"axis={literal(axis)}", *order])
    distribution, given = site.attrs["distribution"], [*map(literal, site.attrs["given"])]
    kind = f"dtype={dtype(site.attrs['dtype'])}"
    rest = [tuple_text(made), kind, "device=device()"]
    plain = _DRAWS.get((distribution, tuple(site.attrs["given"])))
    if plain is not None:
        text = call(plain, rest)
    elif distribution == "integers":
        text = call("torch.randint", [*given, *rest])
    else:
        text = f"{call('torch.empty', rest)}.{distribution}_({', '.join(given)})"
    for cut in cuts:
        text = call("shard", [text, *cut])
    return Expr(text, weight=LIGHT)


_DRAWS = {("uniform", (0.0, 1.0)): "torch.rand", ("normal", (0.0, 1.0)): "torch.randn"}


def _triangle(site: Site) -> Expr:
    diagonal = site.attrs.get("diagonal", 0)
    given = f"{diagonal}" if diagonal else ""
    return Expr(f"{site.args[0].atom}.{site.kind}({given})", weight=LIGHT)


PRINTERS: Mapping[str, Printer] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "var"), _reduction),
    "argmax": _arg,
    "full": _full,
    "arange": _arange,
    "band": _band,
    "constant": _constant,
    "noise": _noise,
    "tril": _triangle,
    "triu": _triangle,
}
