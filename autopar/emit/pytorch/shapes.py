"""Views, concatenations, lookups and pooling as Python, with the sizes of one rank."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from autopar.emit.constants import differing, literal, same
from autopar.emit.pytorch.site import LIGHT, EmitError, Printer, Site
from autopar.emit.sizes import slice_end
from autopar.emit.text import Expr, call, tuple_text
from autopar.rules.lookups import SAMPLES


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _reshape(site: Site) -> Expr:
    return reshaped(site.args[0], site.operand_sizes(0), site.sizes(), site.pieces(0))


def reshaped(
    x: Expr, old: tuple[int, ...], new: tuple[int, ...], pieces: Container[int] = ()
) -> Expr:
    """``x``, which has shape ``old``, in shape ``new``; by the narrowest method there is.

    pieces: dims of ``x`` of which a rank has a piece: heads, say, as many as there are.
    """
    if old == new:
        return Expr(x.text, x.level)
    for dim in range(len(new)):
        if new[dim] == 1 and new[:dim] + new[dim + 1 :] == old:
            return Expr(f"{x.atom}.unsqueeze({dim})")
    for dim in range(len(old)):
        if old[dim] == 1 and old[:dim] + old[dim + 1 :] == new:
            return Expr(f"{x.atom}.squeeze({dim})")
    if [n for n in new if n != 1] == [*old] and len(old) < len(new) and 1 not in old:
        last = max(d for d, n in enumerate(new) if n == 1)
        inner = ", ".join("None" if n == 1 else ":" for n in new[: last + 1])
        return Expr(f"{x.atom}[{inner}]")
    # Neighbouring dims that become one.
    for first in range(len(new)):
        last = first + len(old) - len(new)
        if last > first and old[:first] == new[:first] and old[last + 1 :] == new[first + 1 :]:
            if (first, last) == (0, len(old) - 1):
                return Expr(f"{x.atom}.flatten()")
            return Expr(f"{x.atom}.flatten({first}, {last})")
    # One dim that becomes several; the sizes of the batch need not be said.
    for dim in range(len(old)):
        after = len(old) - dim - 1
        kept = new[:dim] + new[len(new) - after :]
        if len(new) > len(old) and kept == old[:dim] + old[dim + 1 :]:
            parts = new[dim : len(new) - after]
            if dim in pieces and -1 not in parts:
                parts = (-1, *parts[1:])
            return Expr(f"{x.atom}.unflatten({dim}, {literal(parts)})")
    return Expr(f"{x.atom}.reshape({_numbers(new) or '()'})")


def _transpose(site: Site) -> Expr:
    return _ordered(site.args[0], tuple(d % len(site.attrs["dims"]) for d in site.attrs["dims"]))


def _ordered(x: Expr, dims: tuple[int, ...]) -> Expr:
    moved = [i for i, d in enumerate(dims) if i != d]
    if not moved:
        return Expr(x.text, x.level)
    if len(moved) == 2:
        return Expr(f"{x.atom}.transpose({moved[0]}, {moved[1]})")
    return Expr(f"{x.atom}.permute({_numbers(dims)})")


def _view(site: Site) -> Expr:
    """What `autopar.emit.pytorch.views` made of several."""
    x, shape = site.args[0], site.operand(0)
    cut, order, joined = (site.attrs[name] for name in ("cut", "order", "joined"))
    if cut:
        x, shape = reshaped(x, shape, cut, site.pieces(0)), cut
    if order:
        x, shape = _ordered(x, order), tuple(shape[d] for d in order)
    return reshaped(x, shape, joined) if joined else Expr(x.text, x.level)


def _repeat_interleave(site: Site) -> Expr:
    x = reshaped(site.args[0], site.operand(0), site.attrs["cut"])
    given = f"{site.attrs['repeats']}, {site.attrs['dim']}"
    return Expr(f"{x.atom}.repeat_interleave({given})", weight=LIGHT)


def _expand(site: Site) -> Expr:
    old, new = site.operand(0), site.sizes()
    if old == new:
        return Expr(site.args[0].text, site.args[0].level)
    padded = (1,) * (len(new) - len(old)) + old
    sizes = tuple(
        -1 if n == o and i >= len(new) - len(old) else n
        for i, (o, n) in enumerate(zip(padded, new, strict=True))
    )
    return Expr(f"{site.args[0].atom}.expand({_numbers(sizes)})")


def _index_text(rank: int, dim: int, inner: str) -> str:
    """``[:, 1:3]``, ``[..., 1:3]``."""
    if dim == rank - 1 and dim > 1:
        return f"[..., {inner}]"
    return f"[{', '.join([':'] * dim + [inner])}]"


def _slice(site: Site) -> Expr:
    x, rank = site.args[0], len(site.whole(0))
    dim = site.attrs["dim"] % rank
    size = site.whole(0)[dim]
    start, stop, step = (site.attrs.get(n) for n in ("start", "stop", "step"))
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    stop = size if stop is None else max(stop + size, 0) if stop < 0 else min(stop, size)
    if (start, stop, step or 1) == (0, size, 1):
        return Expr(x.text, x.level)
    if site.splits(0, (dim,)):
        raise EmitError(f"{site.at.op.name}: a slice of dim {dim}, which is split")
    if start == 0 and step in (None, 1) and stop == site.result()[dim]:
        stop = site.result()[dim]
    inner = f"{start or ''}:{slice_end(stop, size)}"
    inner += f":{step}" if step not in (None, 1) else ""
    return Expr(f"{x.atom}{_index_text(rank, dim, inner)}")


def _select(site: Site) -> Expr:
    rank = len(site.whole(0))
    dim = site.attrs["dim"] % rank
    index = str(site.attrs["index"])
    return Expr(f"{site.args[0].atom}{_index_text(rank, dim, index)}")


def _split(site: Site) -> Expr:
    x, rank = site.args[0], len(site.whole(0))
    dim = site.attrs["dim"] % rank
    if site.attrs.get("squeeze"):
        return Expr(f"{x.atom}.unbind({dim})", weight=LIGHT)
    sizes = [site.result(i)[dim] for i in range(len(site.at.op.outputs))]
    if len(set(sizes)) == 1:
        return Expr(f"{x.atom}.chunk({len(sizes)}, {dim})", weight=LIGHT)
    return Expr(f"{x.atom}.split({tuple_text(sizes)}, {dim})", weight=LIGHT)


def _join(site: Site) -> Expr:
    parts = tuple_text_of(whole_lists([a.text for a in site.args]))
    dim = site.attrs.get("dim", 0)
    given = [parts] if dim == 0 else [parts, str(dim)]
    return Expr(call(f"torch.{site.kind}", given), weight=LIGHT)


def whole_lists(texts: list[str]) -> list[str]:
    """``*hs`` for ``hs[0]``, ``hs[1]``, and so on up to ``hs[-1]``."""
    made: list[str] = []
    for text in texts:
        head, bracket, index = text.rpartition("[")
        start = made.index(f"{head}[0]") if bracket and f"{head}[0]" in made else len(made)
        if index == "-1]" and made[start:] == [f"{head}[{i}]" for i in range(len(made) - start)]:
            made[start:] = [f"*{head}"]
        else:
            made.append(text)
    return made


def tuple_text_of(texts: list[str]) -> str:
    if len(texts) == 1 and texts[0].startswith("*"):
        return texts[0][1:]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _pad(site: Site) -> Expr:
    pairs: Any = site.attrs["low_high"]
    if pairs and isinstance(pairs[0], int):
        pairs = list(zip(pairs[::2], pairs[1::2], strict=True))
    flat: list[int] = []
    for low, high in reversed(pairs):  # torch starts at the last dim
        flat += [low, high]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    arguments = [site.args[0].text, tuple_text(flat)]
    value = site.attrs.get("value")
    if value is not None and not same(value, 0):
        arguments.append(f"value={site.number(value)}")
    return Expr(call("F.pad", arguments), weight=LIGHT)


def _flip(site: Site) -> Expr:
    return Expr(f"{site.args[0].atom}.flip({tuple_text(site.attrs['dims'])})", weight=LIGHT)


def _roll(site: Site) -> Expr:
    shifts, dims = site.attrs["shifts"], site.attrs["dims"]
    given = [tuple_text(v) if not isinstance(v, int) else str(v) for v in (shifts, dims)]
    return Expr(f"{site.args[0].atom}.roll({', '.join(given)})", weight=LIGHT)


def _with_dim(site: Site) -> Expr:
    """gather, index_select, scatter: ``x.f(dim, index, ...)``."""
    rest = ", ".join(a.text for a in site.args[1:])
    return Expr(f"{site.args[0].atom}.{site.kind}({site.attrs['dim']}, {rest})", weight=LIGHT)


def _scatter_sum(site: Site) -> Expr:
    arguments = [a.text for a in site.args]
    arguments += [str(site.attrs["dim"]), tuple_text(site.sizes())]
    return Expr(call("scatter_sum", arguments), weight=LIGHT)


def _place_rows(site: Site) -> Expr:
    """Rows are as many as places, but for such as torch takes the first of, where no samples are
    apart: in an evaluation these are others than were planned."""
    bound = site.at.bound
    assert bound is not None
    more = site.attrs.get("more") and SAMPLES not in bound.factors
    given = [a.text for a in site.args] + ["more=True"] * bool(more)
    return Expr(call("place_rows", given), weight=LIGHT)


def _row_places(site: Site) -> Expr:
    return Expr(call("row_places", [site.args[0].text, str(site.attrs["count"])]), weight=LIGHT)


def _index(site: Site) -> Expr:
    rank = len(site.whole(0))
    given = {d % rank: a.text for d, a in zip(site.attrs["dims"], site.args[1:], strict=True)}
    items = [given.get(d, ":") for d in range(max(given) + 1)]
    return Expr(f"{site.args[0].atom}[{', '.join(items)}]", weight=LIGHT)


def _one_hot(site: Site) -> Expr:
    return Expr(call("F.one_hot", [site.args[0].text, str(site.attrs["classes"])]), weight=LIGHT)


def _cumsum(site: Site) -> Expr:
    return Expr(f"{site.args[0].atom}.cumsum({site.attrs['dim']})", weight=LIGHT)


def _pool(site: Site) -> Expr:
    spatial = len(site.whole(0)) - 2
    kind = site.kind
    if kind == "adaptive_avg_pool":
        return Expr(
            call(f"F.{kind}{spatial}d", [site.args[0].text, _short(site.attrs["output"])]),
            weight=LIGHT,
        )
    kernel = _short(site.attrs["kernel"])
    defaults = {
        "stride": kernel,
        "padding": "0",
        "dilation": "1",
        "ceil_mode": "False",
        "count_include_pad": "True",
        "divisor_override": "None",
    }
    shown = {name: _short(site.attrs[name]) for name in defaults if name in site.attrs}
    if not site.attrs.get("stride"):  # torch writes no stride as an empty list
        shown["stride"] = kernel
    arguments = [site.args[0].text, kernel, *differing(shown, defaults, str)]
    return Expr(call(f"F.{kind}{spatial}d", arguments), weight=LIGHT)


def _short(value: Any) -> str:
    """``(2, 2)`` as ``2``."""
    if isinstance(value, tuple | list) and len(set(value)) == 1:
        return literal(value[0])
    return literal(value)


def _interpolate(site: Site) -> Expr:
    defaults = {"mode": "nearest", "align_corners": None, "antialias": False}
    given = [f"size={tuple_text(site.attrs['output'])}", *differing(site.attrs, defaults)]
    return Expr(call("F.interpolate", [site.args[0].text, *given]), weight=LIGHT)


PRINTERS: Mapping[str, Printer] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "view": _view,
    "repeat_interleave": _repeat_interleave,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "cat": _join,
    "stack": _join,
    "pad": _pad,
    "flip": _flip,
    "roll": _roll,
    "gather": _with_dim,
    "index_select": _with_dim,
    "scatter": _with_dim,
    "scatter_sum": _scatter_sum,
    "index": _index,
    "place_rows": _place_rows,
    "row_places": _row_places,
    "one_hot": _one_hot,
    "cumsum": _cumsum,
    "max_pool": _pool,
    "avg_pool": _pool,
    "adaptive_avg_pool": _pool,
    "interpolate": _interpolate,
}
