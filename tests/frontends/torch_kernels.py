"""How each op kind is computed, for `interpret`: one line of torch for one kind where possible."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.frontends.shared.noise import dropout_factor, stand_in
from autopar.nouns import graph as nouns
from autopar.nouns.graph import Op


@dataclass(frozen=True, slots=True)
class Call:
    """One op to be run. ``wide`` computes float32 in float64."""

    op: Op
    operands: list[Tensor]
    results: list[nouns.Tensor]
    wide: bool
    dropout: bool

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.op.attrs

    @property
    def x(self) -> Tensor:
        return self.operands[0]

    def dtype(self, name: str) -> torch.dtype:
        wide = self.wide and name in ("float32", "bfloat16", "float16")
        dtype: torch.dtype = torch.float64 if wide else getattr(torch, name)
        return dtype


Kernel = Callable[[Call], Any]


def _fourier(c: Call) -> Tensor:
    function, sizes, dims = (c.attrs[name] for name in ("transform", "sizes", "dims"))
    x = torch.view_as_complex(c.x.contiguous()) if c.attrs["pairs"] else c.x
    if function[-1] not in "2n":
        sizes, dims = None if sizes is None else sizes[0], dims[0]
    made: Tensor = getattr(torch.fft, function)(x, sizes, dims, c.attrs["norm"])
    return torch.view_as_real(made.resolve_conj()) if made.is_complex() else made


def _binary(function: Callable[[Any, Any], Any]) -> Kernel:
    def run(c: Call) -> Any:
        if len(c.operands) == 2:
            return function(*c.operands)
        if c.attrs.get("scalar_first"):
            return function(torch.full_like(c.x, c.attrs["other"]), c.x)
        return function(c.x, c.attrs["other"])

    return run


def _bound(function: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    def run(c: Call) -> Tensor:
        other = c.operands[1] if len(c.operands) == 2 else torch.as_tensor(c.attrs["other"])
        return function(c.x, other)

    return run


def _unary(function: Callable[..., Any], *names: str) -> Kernel:
    return lambda c: function(c.x, **{name: c.attrs[name] for name in names})


def _attention(c: Call) -> Tensor:
    q, k, v = c.operands[:3]
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    sinks = c.operands[-1] if c.attrs.get("sinks") else None
    mask = c.operands[3] if len(c.operands) > 3 + (sinks is not None) else None
    if c.attrs.get("documents"):
        mask = c.operands[3][:, None, :, None] == c.operands[4][:, None, None, :]
    if "window" in c.attrs and mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if mask is not None and c.attrs["causal"]:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        seen = seen.triu(1 - c.attrs.get("window", k.shape[2]))
        mask = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more column of zeros, with its own logit
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is None:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
            mask = mask.tril() if c.attrs["causal"] else mask
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.expand(len(q), len(sinks), *mask.shape[-2:])
        logit = sinks[None, :, None, None].expand(*mask.shape[:3], 1)
        mask = torch.cat([mask, logit], -1)
    mixed = F.scaled_dot_product_attention(
        q, k, v, mask,
        c.attrs["dropout_p"] if c.dropout else 0.0,
        is_causal=c.attrs["causal"] and mask is None,
        scale=c.attrs["scale"],
    )  # fmt: skip
    return mixed if c.dropout else mixed * dropout_factor(c.attrs["dropout_p"])


def _rotary(c: Call) -> Tensor:
    x, cos, sin = c.operands
    cos, sin = (t.unsqueeze(1) for t in (cos, sin))
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if c.attrs["style"] == "half":
        first, second = turned.chunk(2, dim=-1)
        quarter = torch.cat((-second, first), dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        quarter = torch.stack((-second, first), dim=-1).flatten(-2)
    out = turned * cos + quarter * sin
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def _layer_norm(c: Call) -> Tensor:
    weight, bias = [*c.operands[1:], None, None][:2]
    dims = c.attrs["dims"]
    return F.layer_norm(c.x, c.x.shape[len(c.x.shape) - dims :], weight, bias, c.attrs["eps"])


def _rms_norm(c: Call) -> Any:
    weight = c.operands[1] if len(c.operands) > 1 else None
    x: Tensor = c.x.to(c.dtype("float32")) if c.attrs["upcast"] else c.x
    out: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.attrs["eps"])
    if weight is None:
        return out.to(c.x.dtype)
    if c.attrs["scale_offset"]:
        return (out * (c.attrs["scale_offset"] + weight.to(out.dtype))).to(c.x.dtype)
    if c.attrs.get("weight_first"):
        return (weight * out).to(c.x.dtype)
    return weight * out.to(c.x.dtype)


def _batch_norm(c: Call) -> Tensor:
    rest = c.operands[1:]
    weight, bias = rest[:2] if c.attrs["affine"] else (None, None)
    mean, var = rest[-2:] if len(rest) > 2 * c.attrs["affine"] else (None, None)
    return F.batch_norm(
        c.x, mean, var, weight, bias, c.attrs["training"], c.attrs["momentum"], c.attrs["eps"]
    )


def _group_norm(c: Call) -> Tensor:
    weight, bias = [*c.operands[1:], None, None][:2]
    return F.group_norm(c.x, c.attrs["groups"], weight, bias, c.attrs["eps"])


def _spatial(name: str) -> Callable[[Call], Any]:
    """`conv`, `max_pool`, ...: the function for as many spatial dims as there are."""
    return lambda c: getattr(F, f"{name}{c.x.dim() - 2}d")


def _conv(c: Call) -> Tensor:
    names = ("stride", "padding", "dilation", "groups")
    options = {name: c.attrs[name] for name in names}
    out: Tensor = _spatial("conv")(c)(*c.operands, **options)
    return out


def _pool(name: str, **names: str) -> Kernel:
    return lambda c: _spatial(name)(c)(c.x, **{k: c.attrs[v] for k, v in names.items()})


def _embedding(c: Call) -> Tensor:
    return F.embedding(c.x, c.operands[1], padding_idx=c.attrs["padding_idx"])


def _cross_entropy(c: Call) -> Tensor:
    logits, labels = c.operands
    return F.cross_entropy(
        logits,
        labels,
        ignore_index=c.attrs["ignore_index"],
        reduction=c.attrs["reduction"],
        label_smoothing=c.attrs["label_smoothing"],
    )


def _softmax(function: Callable[..., Tensor]) -> Kernel:
    def run(c: Call) -> Tensor:
        dtype = c.attrs.get("dtype")
        return function(c.x, dim=c.attrs["dim"], dtype=c.dtype(dtype) if dtype else None)

    return run


def _cast(c: Call) -> Tensor:
    return c.x.to(c.dtype(c.attrs["dtype"]))


def _where(c: Call) -> Tensor:
    rest = iter(c.operands[1:])
    a, b = (c.attrs[name] if name in c.attrs else next(rest) for name in ("a", "b"))
    return torch.where(c.x, a, b)


def _expand(c: Call) -> Tensor:
    return c.x.expand(c.attrs["shape"])


def _slice(c: Call) -> Tensor:
    a = c.attrs
    index = [slice(None)] * c.x.dim()
    index[a["dim"]] = slice(a["start"], a["stop"], a["step"])
    return c.x[tuple(index)]


def _split(c: Call) -> list[Tensor]:
    parts = torch.split(c.x, list(c.attrs["sizes"]), dim=c.attrs["dim"])
    if c.attrs.get("squeeze"):
        return [p.squeeze(c.attrs["dim"]) for p in parts]
    return list(parts)


def _pad(c: Call) -> Tensor:
    flat = [n for pair in reversed(c.attrs["low_high"]) for n in pair]
    return F.pad(c.x, flat, value=c.attrs["value"])


def _index(c: Call) -> Tensor:
    index: list[Any] = [slice(None)] * c.x.dim()
    for dim, places in zip(c.attrs["dims"], c.operands[1:], strict=True):
        index[dim] = places
    return c.x[tuple(index)]


def _reduction(function: Callable[..., Tensor]) -> Kernel:
    return lambda c: function(c.x, dim=c.attrs["dims"], keepdim=c.attrs["keepdim"])


def _largest(c: Call) -> Tensor:
    if not c.attrs.get("one"):
        return c.x.amax(dim=c.attrs["dims"], keepdim=c.attrs["keepdim"])
    (dim,) = c.attrs["dims"]
    return c.x.max(dim, keepdim=c.attrs["keepdim"]).values


def _many(function: Callable[..., Tensor]) -> Kernel:
    """`any` and `all` take one dim at a time in some versions."""

    def run(c: Call) -> Tensor:
        out = c.x
        for dim in sorted(c.attrs["dims"], reverse=True):
            out = function(out, dim=dim, keepdim=c.attrs["keepdim"])
        return out

    return run


def _full(c: Call) -> Tensor:
    return torch.full(c.attrs["shape"], c.attrs["value"], dtype=c.dtype(c.attrs["dtype"]))


def _arange(c: Call) -> Tensor:
    a = c.attrs
    return torch.arange(a["start"], a["stop"], a["step"], dtype=c.dtype(a["dtype"]))


def _constant(c: Call) -> Tensor:
    return torch.tensor(c.attrs["value"], dtype=c.dtype(c.attrs["dtype"]))


def _noise(c: Call) -> Tensor:
    """Without dropout what stands in for it."""
    made = torch.empty(c.attrs["shape"], dtype=c.dtype(c.attrs["dtype"]))
    name, given = c.attrs["distribution"], c.attrs["given"]
    if not c.dropout:
        whole = not made.is_floating_point()
        return made.fill_(stand_in(name, *given, whole=whole))
    return getattr(made, {"integers": "random_"}.get(name, f"{name}_"))(*given)  # type: ignore[no-any-return]


def _dropout(c: Call) -> Tensor:
    features = bool(c.attrs.get("features"))
    if not c.dropout:
        return c.x * dropout_factor(c.attrs["p"], features)
    return (torch.feature_dropout if features else torch.dropout)(c.x, c.attrs["p"], True)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": torch.true_divide,
    "pow": torch.pow, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "remainder": torch.remainder, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "floor_divide": torch.floor_divide,
}  # fmt: skip


def _experts(c: Call) -> Tensor:
    """Token by token and route by route."""
    x, index, weights, up, down, *biases = c.operands
    if c.attrs["transposed"]:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    first, second = biases or (up.new_zeros(up.shape[:2]), down.new_zeros(down.shape[:2]))
    tokens = []
    for token, route, share in zip(x, index.tolist(), weights, strict=True):
        given = [_gated(c, F.linear(token, up[e], first[e])) for e in route]
        made = [F.linear(h, down[e], second[e]) for e, h in zip(route, given, strict=True)]
        tokens.append(torch.stack(made, 1) @ share)
    return torch.stack(tokens)


def _gated(c: Call, h: Tensor) -> Tensor:
    reads = {"all": (h,), "halves": h.chunk(2), "pairs": (h[::2], h[1::2])}
    values = list(reads[c.attrs["reads"]])
    for kind, operands, attrs in c.attrs["gate"]:
        given = [values[i] for i in operands]
        step = Call(Op(kind, (), (), attrs), given, c.results, c.wide, c.dropout)
        values.append(KERNELS[kind](step))
    return values[-1]


def _ctc_loss(c: Call) -> Tensor:
    x, y, given, wanted = c.operands
    return F.ctc_loss(x, y, given, wanted, c.attrs["blank"], "none", c.attrs["zero_infinity"])


KERNELS: dict[str, Kernel] = {
    "experts": _experts,
    "ctc_loss": _ctc_loss,
    **{kind: _binary(function) for kind, function in _ARITHMETIC.items()},
    "maximum": _bound(torch.maximum),
    "minimum": _bound(torch.minimum),
    **{
        kind: _unary(getattr(torch, kind))
        for kind in (
            "neg exp log sqrt rsqrt tanh sigmoid relu sin cos abs erf square reciprocal detach "
            "isinf isnan sign floor"
        ).split()
    },
    "identity": lambda c: c.x,
    "not": _unary(torch.logical_not),
    "silu": _unary(F.silu),
    "mish": _unary(F.mish),
    "softplus": _unary(F.softplus),
    "gelu": _unary(F.gelu, "approximate"),
    "leaky_relu": _unary(F.leaky_relu, "negative_slope"),
    "elu": _unary(F.elu, "alpha"),
    "hardtanh": _unary(F.hardtanh, "min_val", "max_val"),
    "clamp": _unary(torch.clamp, "min", "max"),
    "linear": lambda c: F.linear(*c.operands),
    "linear_t": lambda c: torch.matmul(*c.operands),
    "matmul": lambda c: torch.matmul(*c.operands),
    "einsum": lambda c: torch.einsum(c.attrs["equation"], *c.operands),
    "conv": _conv,
    "attention": _attention,
    "rotary": _rotary,
    "repeat_heads": lambda c: c.x.repeat_interleave(c.attrs["repeats"], dim=1),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax(torch.softmax),
    "log_softmax": _softmax(torch.log_softmax),
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "cast": _cast,
    "where": _where,
    "masked_fill": lambda c: c.x.masked_fill(c.operands[1], c.attrs["value"]),
    "dropout": _dropout,
    "reshape": lambda c: c.x.reshape(c.attrs["shape"]),
    "transpose": lambda c: c.x.permute(c.attrs["dims"]),
    "expand": _expand,
    "slice": _slice,
    "select": lambda c: c.x.select(c.attrs["dim"], c.attrs["index"]),
    "split": _split,
    "cat": lambda c: torch.cat(c.operands, dim=c.attrs["dim"]),
    "stack": lambda c: torch.stack(c.operands, dim=c.attrs["dim"]),
    "pad": _pad,
    "flip": lambda c: c.x.flip(c.attrs["dims"]),
    "roll": lambda c: c.x.roll(c.attrs["shifts"], c.attrs["dims"]),
    **{
        kind: _reduction(getattr(torch, kind)) for kind in ("sum", "mean", "amin")
    },
    "amax": _largest,
    "any": _many(torch.any),
    "all": _many(torch.all),
    "argmax": lambda c: c.x.argmax(c.attrs["dim"], c.attrs["keepdim"]),
    "var": lambda c: c.x.var(
        c.attrs["dims"], correction=c.attrs["correction"], keepdim=c.attrs["keepdim"]
    ),
    "cumsum": lambda c: c.x.cumsum(c.attrs["dim"]),
    "torch::fft": _fourier,
    "full": _full,
    "arange": _arange,
    "constant": _constant,
    "noise": _noise,
    "tril": lambda c: c.x.tril(c.attrs["diagonal"]),
    "triu": lambda c: c.x.triu(c.attrs["diagonal"]),
    "gather": lambda c: c.x.gather(c.attrs["dim"], c.operands[1]),
    "index_select": lambda c: c.x.index_select(c.attrs["dim"], c.operands[1]),
    "index": _index,
    "scatter": lambda c: c.x.scatter(c.attrs["dim"], *c.operands[1:]),
    "scatter_sum": lambda c: torch.zeros(c.attrs["shape"], dtype=c.x.dtype).scatter_add(
        c.attrs["dim"], c.operands[1], c.x
    ),
    "one_hot": lambda c: F.one_hot(c.x, c.attrs["classes"]),
    "max_pool": _pool(
        "max_pool", kernel_size="kernel", stride="stride", padding="padding", dilation="dilation",
        ceil_mode="ceil_mode",
    ),
    "avg_pool": _pool("avg_pool", kernel_size="kernel", stride="stride", padding="padding"),
    "adaptive_avg_pool": _pool("adaptive_avg_pool", output_size="output"),
}  # fmt: skip
