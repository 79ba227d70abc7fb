"""What each op kind computes, in plain torch: the meaning that the rules are checked against.

A function gets a `Call`: the op's attrs, its operands, and the shapes that its results shall have.
Attrs that name extents of the whole op (``shape``, ``groups``) are taken from the shapes instead
where the op runs on one rank, as an emitted program does.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.lax_reference import LAX_REFERENCE


@dataclass(frozen=True, slots=True)
class Call:
    attrs: Mapping[str, Any]
    operands: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def x(self) -> Tensor:
        return self.operands[0]

    def optional(self, position: int) -> Tensor | None:
        return self.operands[position] if len(self.operands) > position else None


Reference = Callable[[Call], Tensor | tuple[Tensor, ...]]


def _two(function: Callable[[Any, Any], Tensor]) -> Reference:
    def run(call: Call) -> Tensor:
        if len(call.operands) == 2:
            return function(*call.operands)
        other = call.attrs["other"]
        if function is torch.div and call.attrs.get("scalar_first"):
            return cast(Tensor, other / call.x)
        # Python numbers where torch takes them: a tensor would be kept for backward.
        if function in (torch.mul, torch.div, torch.pow) and not call.attrs.get("scalar_first"):
            return function(call.x, other)
        number = torch.tensor(other, dtype=call.x.dtype)
        return function(*(number, call.x) if call.attrs.get("scalar_first") else (call.x, number))

    return run


def _one(function: Callable[[Tensor], Tensor]) -> Reference:
    return lambda call: function(call.x)


def _fourier(call: Call) -> Tensor:
    """`torch.fft` on pairs; the function's own dims, sizes and norm."""
    x = torch.view_as_complex(call.x.contiguous()) if call.attrs["pairs"] else call.x
    several = call.attrs["transform"].endswith(("2", "n"))
    sizes, dims = call.attrs["sizes"], call.attrs["dims"]
    function = getattr(torch.fft, call.attrs["transform"])
    given = {"s": sizes, "dim": dims} if several else {"n": sizes and sizes[0], "dim": dims[0]}
    made = function(x, norm=call.attrs["norm"], **given)
    return cast(Tensor, torch.view_as_real(made.resolve_conj()) if made.is_complex() else made)


def _largest(call: Call) -> Tensor:
    dims, keep = call.attrs["dims"], call.attrs["keepdim"]
    if call.attrs.get("one"):
        return call.x.max(dims[0], keepdim=keep).values
    return torch.amax(call.x, dims, keepdim=keep)


def _over_dims(function: Callable[..., Tensor]) -> Reference:
    return lambda call: function(call.x, dim=call.attrs["dims"], keepdim=call.attrs["keepdim"])


def _mean(call: Call) -> Tensor:
    total = call.x.sum(dim=call.attrs["dims"], keepdim=call.attrs["keepdim"])
    local = math.prod(call.x.shape[d] for d in call.attrs["dims"])
    count: int = call.attrs.get("count", local)
    return total / count


def _all_or_any(function: Callable[..., Tensor]) -> Reference:
    def run(call: Call) -> Tensor:
        x = call.x
        for dim in sorted(call.attrs["dims"], reverse=True):
            x = function(x, dim=dim, keepdim=call.attrs["keepdim"])
        return x

    return run


def _conv(call: Call) -> Tensor:
    x, weight = call.operands
    # As many groups as the local channels and the filters' depth make.
    groups = x.shape[1] // weight.shape[1]
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.dim() - 2]
    a = call.attrs
    return function(x, weight, None, a["stride"], a["padding"], a["dilation"], groups)


def _attention(call: Call) -> Tensor:
    q, k, v = call.operands[:3]
    mask, causal, first = call.optional(3), call.attrs["causal"], call.attrs.get("first_row", 0)
    if causal and first:
        shown = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
        mask, causal = shown, False
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=call.attrs["scale"],
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _rotary(call: Call) -> Tensor:
    x, cos, sin = call.operands
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _layer_norm(call: Call) -> Tensor:
    shape = call.x.shape[call.x.dim() - call.attrs["dims"] :]
    return F.layer_norm(call.x, shape, call.optional(1), call.optional(2), call.attrs["eps"])


def _rms_norm(call: Call) -> Tensor:
    weight = call.optional(1)
    if weight is not None and call.attrs["scale_offset"]:
        weight = weight + call.attrs["scale_offset"]
    return F.rms_norm(call.x, call.x.shape[-1:], weight, call.attrs["eps"])


def _group_norm(call: Call) -> Tensor:
    groups = call.attrs.get("local_groups", call.attrs["groups"])
    return F.group_norm(call.x, groups, call.optional(1), call.optional(2), call.attrs["eps"])


def _batch_norm(call: Call) -> Tensor:
    x, eps = call.x, call.attrs["eps"]
    if not call.attrs["training"]:
        weight, bias, mean, variance = call.operands[1:]
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
    return F.batch_norm(x, None, None, call.optional(1), call.optional(2), True, 0.0, eps)


def _embedding(call: Call) -> Tensor:
    ids, weight = call.operands
    start = call.attrs.get("first_row")
    if start is None:
        return F.embedding(ids, weight)
    # A piece of the vocabulary: rows that others hold count as zero.
    mine = (ids >= start) & (ids < start + weight.shape[0])
    rows = F.embedding((ids - start).clamp(0, weight.shape[0] - 1), weight)
    return torch.where(mine.unsqueeze(-1), rows, torch.zeros((), dtype=weight.dtype))


def linear_logits(attrs: Mapping[str, Any], x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    """What the loss of a loss head reads."""
    matrix = weight.t() if attrs.get("transposed") else weight
    logits: Tensor = F.linear(x, matrix, *bias) * attrs["scale"]
    cap = attrs["cap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _gated(call: Call) -> Tensor:
    gate, up = call.operands
    return (F.silu(gate) if call.attrs["activation"] == "silu" else _gelu_tanh(gate)) * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _linear_cross_entropy(call: Call) -> Tensor:
    x, labels, *held = call.operands
    logits = linear_logits(call.attrs, x, *held)
    return _cross_entropy(Call(call.attrs, (logits, labels), call.shapes))


def _cross_entropy(call: Call) -> Tensor:
    logits, labels = call.operands
    a = call.attrs
    options = {"ignore_index": a["ignore_index"], "label_smoothing": a["label_smoothing"]}
    if a["reduction"] != "mean":
        return F.cross_entropy(logits, labels, reduction=a["reduction"], **options)
    total = F.cross_entropy(logits, labels, reduction="sum", **options)
    count: int = a.get("count", int((labels != a["ignore_index"]).sum()))
    return total / count


def _ctc_loss(call: Call) -> Tensor:
    x, y, given, wanted = call.operands
    blank, infinity = call.attrs["blank"], call.attrs["zero_infinity"]
    return F.ctc_loss(x, y, given, wanted, blank, "none", infinity)


def _where(call: Call) -> Tensor:
    condition, *rest = call.operands
    values = [
        rest.pop(0)
        if call.attrs.get(n) is None
        else torch.tensor(call.attrs[n], dtype=torch.double)
        for n in ("a", "b")
    ]
    return torch.where(condition, values[0], values[1])


def _expand(call: Call) -> Tensor:
    return call.x.expand(call.shapes[0])


def _slice(call: Call) -> Tensor:
    a = call.attrs
    cut = [slice(None)] * call.x.dim()
    cut[a["dim"]] = slice(a["start"], a["stop"], a["step"])
    return call.x[tuple(cut)]


def _split(call: Call) -> tuple[Tensor, ...]:
    dim = call.attrs["dim"]
    pieces = torch.split(call.x, list(call.attrs["sizes"]), dim)
    return tuple(p.squeeze(dim) for p in pieces) if call.attrs.get("squeeze") else pieces


def _pad(call: Call) -> Tensor:
    flat = [n for pair in reversed(call.attrs["low_high"]) for n in pair]
    return F.pad(call.x, flat, value=call.attrs["value"])


def _index(call: Call) -> Tensor:
    x, *indices = call.operands
    where: list[Any] = [slice(None)] * x.dim()
    for dim, index in zip(call.attrs["dims"], indices, strict=True):
        where[dim] = index
    return x[tuple(where)]


def _pool(function: Callable[..., Tensor]) -> Reference:
    def run(call: Call) -> Tensor:
        names = {"kernel": "kernel_size", "stride": "stride", "padding": "padding"}
        return function(call.x, **{long: call.attrs[short] for short, long in names.items()})

    return run


def _experts(call: Call) -> Tensor:
    """Every expert for every token; what no route asks for is weighted by zero. ``experts``: which
    ones there are, where it is not all of them."""
    x, index, weights, up, down, *biases = call.operands
    up_bias, down_bias = biases or (torch.zeros(()), torch.zeros(()))
    if call.attrs["transposed"]:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    h = torch.einsum("nd,egd->neg", x, up) + up_bias
    reads = {"all": (h,), "halves": h.chunk(2, -1), "pairs": (h[..., ::2], h[..., 1::2])}
    values = list(reads[call.attrs["reads"]])
    for kind, operands, attrs in call.attrs["gate"]:
        given = tuple(values[i] for i in operands)
        values += run(kind, Call(attrs, given, (tuple(given[0].shape),)))
    each = torch.einsum("nef,edf->ned", values[-1], down) + down_bias
    held = call.attrs.get("experts", range(up.shape[0]))
    most = 1 + max(*held, int(index.max()) if index.numel() else 0)
    share = torch.zeros(x.shape[0], most, dtype=weights.dtype).scatter_add(1, index, weights)
    return torch.einsum("ned,ne->nd", each, share[:, [*held]])


def _feed_forward(call: Call) -> Tensor:
    count = call.attrs["ups"]
    x, *matrices = call.operands[: count + 2]
    if call.attrs["transposed"]:
        matrices = [matrix.t() for matrix in matrices]
    biases = dict(zip(call.attrs["biases"], call.operands[count + 2 :], strict=True))
    values = [F.linear(x, up, biases.get(place)) for place, up in enumerate(matrices[:-1])]
    for kind, operands, attrs in call.attrs["gate"]:
        given = tuple(values[i] for i in operands)
        values += run(kind, Call(attrs, given, (tuple(given[0].shape),)))
    return F.linear(values[-1], matrices[-1])


REFERENCE: Mapping[str, Reference] = {
    "feed_forward": _feed_forward,
    "experts": _experts,
    "linear": lambda c: F.linear(*c.operands),
    "linear_t": lambda c: c.operands[0] @ c.operands[1],
    "matmul": lambda c: torch.matmul(*c.operands),
    "grouped_linear": lambda c: torch.einsum(
        "nk,nkm->nm", c.operands[0], c.operands[2][c.operands[1]]
    ),
    "einsum": lambda c: torch.einsum(c.attrs["equation"], *c.operands),
    "conv": _conv,
    "attention": _attention,
    "rotary": _rotary,
    "repeat_heads": lambda c: c.x.repeat_interleave(
        c.attrs.get("local_repeats", c.attrs["repeats"]), 1
    ),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": lambda c: F.softmax(c.x, c.attrs["dim"]),
    "log_softmax": lambda c: F.log_softmax(c.x, c.attrs["dim"]),
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "ctc_loss": _ctc_loss,
    "add": _two(torch.add),
    "sub": _two(torch.sub),
    "mul": _two(torch.mul),
    "div": _two(torch.div),
    "pow": _two(torch.pow),
    "maximum": _two(torch.maximum),
    "minimum": _two(torch.minimum),
    "remainder": _two(torch.remainder),
    "floor_divide": _two(torch.floor_divide),
    "jax::rem": _two(torch.fmod),
    "jax::div": _two(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "jax::is_finite": _one(torch.isfinite),
    "jax::ceil": _one(torch.ceil),
    "jax::rint": _one(torch.round),
    "jax::atan2": _two(torch.atan2),
    "jax::igamma": _two(torch.special.gammainc),
    "jax::igammac": _two(torch.special.gammaincc),
    "jax::clamp": lambda c: torch.clamp(c.operands[1], c.operands[0], c.operands[2]),
    "jax::cbrt": _one(lambda x: x.pow(1 / 3)),
    "jax::erf_inv": _one(torch.erfinv),
    **{
        f"jax::{name}": _one(getattr(torch, name))
        for name in (
            "acos acosh asin asinh atan atanh cosh digamma erfc expm1 lgamma log1p sinh tan"
        ).split()
    },
    "eq": _two(torch.eq),
    "ne": _two(torch.ne),
    "lt": _two(torch.lt),
    "le": _two(torch.le),
    "gt": _two(torch.gt),
    "ge": _two(torch.ge),
    "and": _two(torch.logical_and),
    "or": _two(torch.logical_or),
    "xor": _two(torch.logical_xor),
    "neg": _one(torch.neg),
    "exp": _one(torch.exp),
    "log": _one(torch.log),
    "sqrt": _one(torch.sqrt),
    "rsqrt": _one(torch.rsqrt),
    "tanh": _one(torch.tanh),
    "sigmoid": _one(torch.sigmoid),
    "relu": _one(torch.relu),
    "gelu": _one(F.gelu),
    "silu": _one(F.silu),
    "gated_activation": _gated,
    "sin": _one(torch.sin),
    "cos": _one(torch.cos),
    "abs": _one(torch.abs),
    "not": _one(torch.logical_not),
    "erf": _one(torch.erf),
    "square": _one(torch.square),
    "softplus": _one(F.softplus),
    "leaky_relu": _one(F.leaky_relu),
    "elu": _one(F.elu),
    "hardtanh": _one(F.hardtanh),
    "mish": _one(F.mish),
    "reciprocal": _one(torch.reciprocal),
    "identity": _one(lambda x: x.view_as(x)),
    "detach": _one(torch.detach),
    "clamp": lambda c: c.x.clamp(c.attrs["min"], c.attrs["max"]),
    "isinf": _one(torch.isinf),
    "isnan": _one(torch.isnan),
    "sign": _one(torch.sign),
    "floor": _one(torch.floor),
    "cast": lambda c: c.x.to(getattr(torch, c.attrs["dtype"])),
    "where": _where,
    "masked_fill": lambda c: c.x.masked_fill(c.operands[1], c.attrs["value"]),
    "dropout": lambda c: getattr(
        torch,
        "feature_" * bool(c.attrs.get("features"))
        + "alpha_" * bool(c.attrs.get("alpha"))
        + "dropout",
    )(c.x, c.attrs["p"], True),
    "reshape": lambda c: c.x.reshape(c.shapes[0]),
    "transpose": lambda c: c.x.permute(c.attrs["dims"]),
    "expand": _expand,
    "slice": _slice,
    "select": lambda c: c.x.select(c.attrs["dim"], c.attrs["index"]),
    "split": _split,
    "cat": lambda c: torch.cat(c.operands, c.attrs["dim"]),
    "stack": lambda c: torch.stack(c.operands, c.attrs["dim"]),
    "pad": _pad,
    "flip": lambda c: c.x.flip(c.attrs["dims"]),
    "roll": lambda c: c.x.roll(c.attrs["shifts"], c.attrs["dims"]),
    "sum": _over_dims(torch.sum),
    "mean": _mean,
    "amax": _largest,
    "amin": _over_dims(torch.amin),
    "any": _all_or_any(torch.any),
    "all": _all_or_any(torch.all),
    "argmax": lambda c: c.x.argmax(c.attrs["dim"], c.attrs["keepdim"]),
    "var": lambda c: torch.var(
        c.x, c.attrs["dims"], correction=c.attrs["correction"], keepdim=c.attrs["keepdim"]
    ),
    "torch::fft": _fourier,
    "cumsum": lambda c: c.x.cumsum(c.attrs["dim"]),
    **LAX_REFERENCE,
    "jax::top_k": lambda c: tuple(c.x.topk(c.attrs["k"], c.attrs["dim"])),
    "full": lambda c: torch.full(c.shapes[0], c.attrs["value"], dtype=torch.double),
    "noise": lambda c: torch.full(c.shapes[0], 0.5, dtype=torch.double),  # its stand-in
    "arange": lambda c: torch.arange(c.attrs["start"], c.attrs["stop"], c.attrs["step"]),
    "constant": lambda c: torch.tensor(c.attrs["value"], dtype=torch.double),
    "carry": lambda c: c.operands[1],
    "tril": lambda c: c.x.tril(c.attrs["diagonal"]),
    "triu": lambda c: c.x.triu(c.attrs["diagonal"]),
    "gather": lambda c: c.x.gather(c.attrs["dim"], c.operands[1]),
    "index_select": lambda c: c.x.index_select(c.attrs["dim"], c.operands[1]),
    "index": _index,
    "place_rows": lambda c: c.x.masked_scatter(
        c.operands[1].reshape(*c.operands[1].shape, *(1 for _ in c.x.shape[c.operands[1].dim() :])),
        c.operands[2],
    ),
    "row_places": lambda c: c.x.nonzero()[:, 1].reshape(c.x.shape[0], c.attrs["count"]),
    "scatter_sum": lambda c: torch.zeros(c.shapes[0], dtype=c.x.dtype).scatter_add(
        c.attrs["dim"], c.operands[1], c.x
    ),
    "scatter": lambda c: c.x.scatter(c.attrs["dim"], c.operands[1], c.operands[2]),
    "one_hot": lambda c: F.one_hot(c.x, c.attrs["classes"]),
    "max_pool": _pool(F.max_pool2d),
    "avg_pool": _pool(F.avg_pool2d),
    "adaptive_avg_pool": lambda c: F.adaptive_avg_pool2d(c.x, c.attrs["output"]),
    "interpolate": lambda c: F.interpolate(c.x, c.attrs["output"], mode=c.attrs["mode"]),
}


def _as_called(kind: str, call: Call) -> Tensor | tuple[Tensor, ...]:
    """The call that the op's attrs hold, operands filled in."""
    held = call.attrs["torch"]

    def filled(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("%"):
            return call.operands[int(value[1:])]
        return [filled(v) for v in value] if isinstance(value, tuple | list) else value

    args = map(filled, held["args"])
    space, _, name = kind.partition("::")
    if space == "transformers":
        importlib.import_module("transformers.integrations.moe")  # registers it
    made = getattr(getattr(torch.ops, space), name)(*args, **held["kwargs"])
    return tuple(made) if isinstance(made, list | tuple) else cast(Tensor, made)


def run(kind: str, call: Call) -> tuple[Tensor, ...]:
    """The results of ``kind``, always as a tuple."""
    results = REFERENCE[kind](call) if kind in REFERENCE else _as_called(kind, call)
    return results if isinstance(results, tuple) else (results,)
