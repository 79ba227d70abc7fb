"""Layers as Python: products, lookups, attention, norms, the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.emit.constants import differing, literal, number
from autopar.emit.pytorch.pieces import IN_PIECES
from autopar.emit.pytorch.site import HEAVY, LIGHT, EmitError, Layer, Printer, Site, dtype
from autopar.emit.text import PRODUCT, UNARY, Expr, axes_text, axis_argument, call, tuple_text
from autopar.lowering.lowered import Operand
from autopar.nouns.recipes import Narrow
from autopar.rules.implementations.kernels import ATTR
from autopar.rules.implementations.table import CAUSAL_RING, KEPT_ROWS, RING, ZIGZAG_RING
from autopar.rules.narrow import RECIPE, joined_axes, local_of

# -- products and lookups ------------------------------------------------------------------------


def _called(
    site: Site,
    kind: str,
    held: Mapping[str, Expr | None],
    given: Sequence[str],
    options: Sequence[str] = (),
) -> Expr | None:
    """A call of the layer that holds an op's parameters, see `_layer`."""
    layer = _layer(site, kind, held, options)
    return None if layer is None else Expr(call(layer, given), weight=HEAVY)


def _layer(
    site: Site, kind: str, held: Mapping[str, Expr | None], options: Sequence[str] = ()
) -> str | None:
    """The layer that holds an op's parameters under the names of ``held``.

    None where they are no one layer's, or moved or cast before they are computed with.
    """
    operands = site.at.operands[len(site.at.operands) - sum(e is not None for e in held.values()) :]
    return held_by(site, kind, held, operands, options)


def held_by(
    site: Site,
    kind: str,
    held: Mapping[str, Expr | None],
    operands: Sequence[Operand],
    options: Sequence[str] = (),
) -> str | None:
    """The layer that holds ``operands`` under the names of ``held``, as text; None as `_called`."""
    texts = {name: expr.text for name, expr in held.items() if expr is not None}
    names = {name: f"local(%.{name})" if "running" not in name else f"%.{name}" for name in texts}
    first = next(iter(texts), "")
    layer = texts[first].removeprefix("local(").removesuffix(f".{first})") if first else "self"
    if layer == "self" or texts != {n: t.replace("%", layer) for n, t in names.items()}:
        return None
    path = operands[0].name.rpartition(".")[0]
    if any(o.steps or o.name.rpartition(".")[0] != path for o in operands):
        return None
    return layer if site.layer(path, Layer(kind, tuple(texts), tuple(options))) else None


def _linear(site: Site) -> Expr:
    x, weight = site.args[0].text, site.args[1]
    if RECIPE in site.attrs:
        return _scaled_linear(site, x, weight)
    if site.kind == "linear_t":
        if site.bias is None:
            return Expr(f"{site.args[0].within(UNARY)} @ {weight.atom}", PRODUCT, weight=HEAVY)
        return Expr(call("F.linear", [x, f"{weight.atom}.t()", *_bias(site)]), weight=HEAVY)
    plain = Expr(call("F.linear", [x, weight.text, *_bias(site)]), weight=HEAVY)
    return _called(site, "Linear", {"weight": weight, "bias": site.bias}, [x]) or plain


def _scaled_linear(site: Site, x: str, weight: Expr) -> Expr:
    """By its recipe, with the axes whose ranks join scales."""
    op, bound = site.at.op, site.at.bound
    assert bound is not None
    layer = None
    if site.kind == "linear":
        layer = _layer(site, "Linear", {"weight": weight, "bias": site.bias})
    text = weight.text if site.kind == "linear" else f"{weight.atom}.t()"
    given = [x, layer] if layer else [x, text, *_bias(site)]
    narrow = Narrow.parse(site.attrs[RECIPE])
    over = joined_axes(local_of(op, bound, site.at.strategy, site.mesh), narrow)
    axes = [f"{dim}={axes_text(axes)}" for dim, axes in over.items()]
    return Expr(call("scaled_linear", [*given, f'recipe="{narrow}"', *axes]), weight=HEAVY)


def _bias(site: Site) -> list[str]:
    return [] if site.bias is None else [site.bias.text]


def _matmul(site: Site) -> Expr:
    left, right = site.args
    text = f"{left.within(UNARY)} @ {right.within(UNARY)}"
    return Expr(text, PRODUCT, weight=HEAVY)


def _einsum(site: Site) -> Expr:
    equation = literal(site.attrs["equation"])
    return Expr(call("torch.einsum", [equation, *(a.text for a in site.args)]), weight=HEAVY)


def _conv(site: Site) -> Expr:
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    attrs = {name: _same(site.attrs[name]) for name in defaults if name in site.attrs}
    if site.attrs.get("groups", 1) != 1:
        # Channels of this rank over channels of one group: right for split groups too.
        attrs["groups"] = site.operand(0)[1] // site.operand(1)[1]
    options = differing(attrs, defaults)
    x, weight = site.args
    function = f"F.conv{len(site.whole(0)) - 2}d"
    plain = Expr(call(function, [x.text, weight.text, *_bias(site), *options]), weight=HEAVY)
    held = {"weight": weight, "bias": site.bias}
    return _called(site, "Conv", held, [x.text], options) or plain


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
    function = "embedding" if site.beside else "F.embedding"
    plain = Expr(call(function, [ids, weight, *site.beside, *given]), weight=HEAVY)
    held = {"weight": site.args[1]}
    return _called(site, "Embedding", held, [ids, *site.beside], given) or plain


def _cross_entropy(site: Site) -> Expr:
    logits, labels = site.args[0].text, site.args[1].text
    counts = {"mean": [f"count={site.count}"], "none": ["count=None"]}
    given = counts.get(site.attrs.get("reduction", "mean"), [])
    given += differing(site.attrs, {"ignore_index": -100, "label_smoothing": 0.0})
    if site.beside and len(site.whole(1)) != 1:
        raise EmitError(f"{site.at.op.name}: labels that are probabilities need whole rows")
    return Expr(call("cross_entropy", [logits, labels, *given, *site.beside]), weight=HEAVY)


def _linear_cross_entropy(site: Site) -> Expr:
    """The module that holds weight and bias stays a linear layer, of which both are read."""
    x, labels, weight, *bias = (a.text for a in site.args)
    held = dict(zip(("weight", "bias"), site.args[2:], strict=False))
    _called(site, "Linear", held, [x])
    options = [x, weight, labels, *bias]
    options += [f"count={site.count}"] if site.attrs.get("reduction", "mean") == "mean" else []
    options.append(f"chunks={site.attrs['chunks']}")
    plain = {"ignore_index": -100, "label_smoothing": 0.0, "scale": 1.0, "cap": None}
    options += differing(site.attrs, plain)
    options += [f'kernel="{site.attrs[ATTR]}"'] if ATTR in site.attrs else []
    return Expr(call("linear_cross_entropy", [*options, *site.beside]), weight=HEAVY)


def _ctc_loss(site: Site) -> Expr:
    options = differing(site.attrs, {"blank": 0, "zero_infinity": False})
    return Expr(call("ctc_loss", [*(a.text for a in site.args), *options]), weight=HEAVY)


# -- attention and norms -------------------------------------------------------------------------


def _attention(site: Site) -> Expr:
    if "window" in site.attrs and not site.attrs.get("causal"):
        raise EmitError(f"{site.at.op.name}: windows without a causal mask are masks in programs")
    arguments = [a.text for a in site.args[:3]]
    documents = bool(site.attrs.get("documents"))
    masked = 3 + bool(site.attrs.get("sinks"))
    if len(site.args) > masked and not documents:
        arguments.append(f"mask={site.args[3].text}")
    arguments += ["causal=True"] if site.attrs.get("causal") else []
    arguments += [f"window={site.attrs['window']}"] if "window" in site.attrs else []
    if documents:
        arguments.append(f"documents=({', '.join(a.text for a in site.args[3:5])})")
    if site.attrs.get("sinks"):
        arguments.append(f"sinks={site.args[-1].text}")
    arguments += site.beside
    if ATTR in site.attrs and not site.at.implementations:
        arguments.append(f'kernel="{site.attrs[ATTR]}"')
    scale = site.attrs.get("scale")
    if scale is not None and not math.isclose(scale, site.operand(0)[-1] ** -0.5):
        arguments.append(f"scale={number(scale)}")
    if site.attrs.get("dropout_p"):
        arguments.append(f"dropout={literal(site.attrs['dropout_p'])} * self.training")
        apart = site.drawn_apart(dims=3)  # scores [b, h, s, t] are dropped
        arguments += [axis_argument(apart)] if apart else []
    runs_by = site.at.implementations.keys()
    function = "ring_attention" if {CAUSAL_RING, RING, ZIGZAG_RING} & runs_by else "attention"
    function = "sliced_attention" if KEPT_ROWS in runs_by else function
    return Expr(call(function, arguments), weight=HEAVY)


def _rotary(site: Site) -> Expr:
    return Expr(call("rotary", [a.text for a in site.args]), weight=HEAVY)


def _repeat_heads(site: Site) -> Expr:
    repeats = site.result()[1] // site.operand(0)[1]
    return Expr(call("repeat_heads", [site.args[0].text, str(repeats)]), weight=LIGHT)


def _layer_norm(site: Site) -> Expr:
    trailing = site.operand(0)[-int(site.attrs.get("dims", 1)) :]
    eps = float(site.attrs.get("eps", 1e-5))
    if len(site.args) > 1 and trailing == site.operand(1):
        held = dict(zip(("weight", "bias"), site.args[1:], strict=False))
        if layer := _called(site, "LayerNorm", held, [site.args[0].text], _eps(site)):
            return layer
    arguments = [site.args[0].text, tuple_text(trailing), *(a.text for a in site.args[1:])]
    if eps != 1e-5:
        arguments.append(literal(eps) if len(site.args) == 3 else f"eps={literal(eps)}")
    return Expr(call("F.layer_norm", arguments), weight=HEAVY)


def _eps(site: Site) -> list[str]:
    return differing(site.attrs, {"eps": 1e-5}, lambda eps: literal(float(eps)))


def _rms_norm(site: Site) -> Expr:
    eps, options = literal(float(site.attrs["eps"])), []
    if site.attrs.get("scale_offset"):
        options.append(f"offset={literal(float(site.attrs['scale_offset']))}")
    if len(site.args) > 1:
        held, every = {"weight": site.args[1]}, [f"eps={eps}", *options]
        if layer := _called(site, "RMSNorm", held, [site.args[0].text], every):
            return layer
    weight = site.args[1].text if len(site.args) > 1 else "None"
    arguments = [site.args[0].text, weight, eps, *options]
    return Expr(call("rms_norm", arguments), weight=HEAVY)


def _group_norm(site: Site) -> Expr:
    groups = int(site.attrs["groups"]) * site.operand(0)[1] // site.whole(0)[1]
    if len(site.args) == 3:
        held = {"weight": site.args[1], "bias": site.args[2]}
        every = [f"groups={groups}", *_eps(site)]
        if layer := _called(site, "GroupNorm", held, [site.args[0].text], every):
            return layer
    arguments = [site.args[0].text, str(groups), *(a.text for a in site.args[1:]), *_eps(site)]
    return Expr(call("F.group_norm", arguments), weight=HEAVY)


def _batch_norm(site: Site) -> Expr:
    training = bool(site.attrs.get("training", True))
    options = differing(site.attrs, {"momentum": 0.1} if training else {}) + _eps(site)
    if site.attrs.get("updates_buffers") and any(o.steps for o in site.at.operands[-2:]):
        raise EmitError(f"{site.at.op.name}: running statistics must be stored as they are used")
    more = [*site.beside] if training else ["training=False"]
    names = ["weight", "bias"] if site.attrs.get("affine", len(site.args) in (3, 5)) else []
    names += ["running_mean", "running_var"] if len(site.args) - 1 > len(names) else []
    held = dict(zip(names, site.args[1:], strict=True))
    if len(held) == 4:
        if layer := _called(site, "BatchNorm", held, [site.args[0].text, *more], options):
            return layer
    if site.attrs.get("updates_buffers"):  # evaluation takes them as they are
        more.append("training=self.training")
    given = [f"{name}={arg.text}" for name, arg in held.items()]
    arguments = [site.args[0].text, *given, *options, *more]
    return Expr(call("batch_norm", arguments), weight=HEAVY)


def _normalize(site: Site) -> Expr:
    options = differing(site.attrs, {"dim": 1, "eps": 1e-12})
    return Expr(call("F.normalize", [site.args[0].text, *options]), weight=HEAVY)


def _softmax(site: Site) -> Expr:
    arguments = [site.args[0].text, f"dim={site.attrs.get('dim', -1)}"]
    given = site.lowered.graph.tensors[site.at.op.name].dtype
    # In half precision the kernel computes in float32 anyway and rounds once.
    if site.attrs.get("dtype") == given:
        arguments.append(f"dtype={dtype(site.attrs['dtype'])}")
    return Expr(call(f"F.{site.kind}", arguments), weight=HEAVY)


def _in_pieces(site: Site) -> Expr:
    """``gathered_linears(x, (self.q, self.k), dim=1, axis="tp", pieces=4)``"""
    attrs, held, names = site.attrs, [], site.attrs["held"]
    place = 1
    for biased in names:
        parts = ("weight", "bias")[: 1 + biased]
        own = slice(place, place + len(parts))
        texts = dict(zip(parts, site.args[own], strict=True))
        layer = held_by(site, "Linear", texts, site.at.operands[own])
        apart = [expr.text for expr in texts.values()]
        held.append(layer or (apart[0] if len(apart) == 1 else f"({', '.join(apart)})"))
        place += len(parts)
    dim = [] if attrs["dim"] is None else [f"dim={attrs['dim']}"]
    layers = held[0] if len(held) == 1 else f"({', '.join(held)})"
    given = [site.args[0].text, layers, *dim, f"axis={literal(attrs['axis'])}"]
    return Expr(call(attrs["call"], [*given, f"pieces={attrs['pieces']}"]), weight=HEAVY)


PRINTERS: Mapping[str, Printer] = {
    IN_PIECES: _in_pieces,
    "linear": _linear,
    "linear_t": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "conv": _conv,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "ctc_loss": _ctc_loss,
    "attention": _attention,
    "rotary": _rotary,
    "repeat_heads": _repeat_heads,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "normalize": _normalize,
    "softmax": _softmax,
    "log_softmax": _softmax,
}
