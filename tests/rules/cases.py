"""Random small ops of every kind, odd sizes and indivisible heads included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.rules.elementwise import JAX_FUNCTIONS
from tests.rules.drawing import Case, Draw, case
from tests.rules.lax_cases import LAX_CASES
from tests.rules.torch_cases import TORCH_CASES

Builder = Callable[[Draw, str], tuple[tuple[Tensor, ...], dict[str, Any]]]


def build(kind: str, data: st.DataObject) -> Case:
    """A random op of ``kind``."""
    operands, attrs = CASES[kind](Draw(data), kind)
    return case(kind, operands, attrs)


def _two(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    shape = d.shape(1, 3)
    if kind in ("jax::igamma", "jax::igammac"):  # no derivative by the first in torch
        return (d.real(*shape, gradient=False), d.real(*shape)), {}
    if kind == "jax::atan2":
        return (d.real(*shape), d.real(*shape)), {}
    if kind in ("floor_divide", "jax::div"):  # no derivative in torch
        return (d.real(*shape, gradient=False), d.real(*d.broadcast(shape), gradient=False)), {}
    if d.flag():
        return (d.real(*shape),), {"other": d.of(0, 1.5), "scalar_first": d.flag()} | (
            {"other": 1.5} if kind in ("div", "remainder", "jax::rem", "pow") else {}
        )
    pair = [d.real(*shape), d.real(*d.broadcast(shape))]
    return tuple(reversed(pair) if d.flag() else pair), {}


def _one(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    shape = d.shape(1, 3)
    positive = kind in ("log", "sqrt", "rsqrt", "reciprocal")
    extra: dict[str, dict[str, Any]] = {
        "cast": {"dtype": "float64"},
        "clamp": {"min": -0.5, "max": 0.5},
        "dropout": _dropped(d, shape) if kind == "dropout" else {},
    }
    return (d.real(*shape) if positive else d.signed(*shape),), extra.get(kind, {})


def _in_domain(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Numbers that the function of JAX is defined for."""
    x = d.real(*d.shape(1, 3), gradient=False)
    if kind == "jax::acosh":
        x = x + 1
    elif kind in ("jax::acos", "jax::asin", "jax::atanh", "jax::erf_inv"):
        x = x * 0.7
    return (x.requires_grad_(),), {}


def _between(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """clamp(least, x, most)"""
    del kind
    shape = d.shape(1, 3)
    return (d.real(*shape) - 0.5, d.signed(*shape), d.real(*shape) + 0.5), {}


def _dropped(d: Draw, shape: tuple[int, ...]) -> dict[str, Any]:
    """Ranks cannot draw what one device draws: so small a share that nothing is dropped."""
    share = {"p": d.of(0.0, 1e-12)}
    features = {"features": True} if len(shape) > 2 and d.flag() else {}
    return share | features | ({"alpha": True} if d.flag() else {})


def _linear(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    k, n = d.size(), d.size()
    weight = (n, k) if kind == "linear" else (k, n)
    return (d.real(*d.shape(1, 2), k), d.real(*weight)), {}


def _grouped_linear(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    groups, n, k, m = d.of(1, 3, 4), d.size(), d.size(), d.size()
    return (d.real(n, k), d.ids(groups, n), d.real(groups, k, m)), {}


def _matmul(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    m, k, n = d.size(), d.size(), d.size()
    batch = d.shape(0, 2)
    pair = (d.real(*batch, m, k), d.real(*d.broadcast(batch), k, n))
    return pair, {}


def _einsum(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    equation = d.of(
        "abc,dc->abd", "ab,bc->ca", "abc,abd->cd", "ab->ba", "abc->b", "...ij,...jk->...ik"
    )
    extents = {letter: d.size() for letter in "abcdijk"}
    left = equation.partition("->")[0]
    shapes = [[extents[c] for c in part.replace("...", "a")] for part in left.split(",")]
    return tuple(d.real(*s) for s in shapes), {"equation": equation}


def _conv(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    rank, groups = d.of(1, 2), d.of(1, 1, 2, 4)
    inside, out = d.small(), d.small()
    space = [d.of(4, 5, 6) for _ in range(rank)]
    x = d.real(d.size(), groups * inside, *space)
    weight = d.real(groups * out, inside, *[d.of(1, 3) for _ in range(rank)])
    each = {"stride": (d.of(1, 2),) * rank, "padding": (d.of(0, 1),) * rank}
    return (x, weight), {**each, "dilation": (1,) * rank, "groups": groups}


def _attention(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    b, g, r, s, t, k = (
        d.small(),
        d.of(1, 2, 3, 4),
        d.of(1, 2, 3, 4),
        d.small(),
        d.small(),
        d.of(2, 4),
    )
    e = d.of(k, 2)
    operands = [d.real(b, g * r, s, k), d.real(b, g, t, k), d.real(b, g, t, e)]
    causal = d.flag()
    if not causal and d.flag():
        full = (b, g * r, s, t)
        shape = tuple(1 if d.of(False, False, True) else n for n in full)[d.of(0, 0, 2) :]
        mask = d.bits(*shape)
        mask[..., 0] = True  # every row sees something
        operands.append(d.real(*shape) if d.flag() else mask)
    return tuple(operands), {"causal": causal, "scale": d.of(None, 0.5), "dropout_p": 0.0}


def _rotary(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    b, s, k = d.size(), d.size(), d.of(2, 4)
    rows = d.of(1, b)
    angles = [d.real(rows, s, k, gradient=False) for _ in range(2)]
    return (d.real(b, d.size(), s, k), *angles), {"style": "half"}


def _layer_norm(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    dims = d.of(1, 1, 2)
    trailing = [d.of(2, 3, 4) for _ in range(dims)]
    affine = [d.real(*trailing) for _ in range(d.of(0, 1, 2))]
    return (d.real(*d.shape(1, 2), *trailing), *affine), {"dims": dims, "eps": 1e-5}


def _rms_norm(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    width = d.of(2, 3, 4)
    affine = [d.real(width) for _ in range(d.of(0, 1))]
    attrs = {"eps": 1e-5, "upcast": False, "scale_offset": d.of(0, 1)}
    return (d.real(*d.shape(1, 2), width), *affine), attrs


def _group_norm(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    groups, channels = d.size(), d.of(1, 2, 3)
    affine = [d.real(groups * channels) for _ in range(d.of(0, 2))]
    x = d.real(d.size(), groups * channels, *d.of((3,), (2, 3)))
    return (x, *affine), {"groups": groups, "eps": 1e-5}


def _batch_norm(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    channels, training = d.size(), d.of(True, True, False)
    affine = [d.real(channels) for _ in range(d.of(0, 1, 2) if training else 2)]
    stored = [] if training else [d.real(channels, gradient=False) for _ in range(2)]
    image = d.of((), (4,), (2, 3))
    # Two samples alone have no scale of their own: their gradients cancel.
    x = d.real(d.of(2, 3, 4, 6) if image else d.of(6, 8), channels, *image)
    attrs = {"eps": 1e-5, "momentum": 0.1, "training": training}
    return (x, *affine, *stored), attrs


def _softmax(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.signed(*shape),), {"dim": d.dim(shape)}


def _embedding(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    rows = d.of(3, 4, 7, 8, 12)
    return (d.ids(rows, *d.shape(0, 2)), d.real(rows, d.size(), gradient=True)), {
        "padding_idx": None
    }


def _linear_cross_entropy(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    (logits, labels), attrs = _cross_entropy(d, kind)
    (rows, classes), width = logits.shape, d.size()
    if attrs["reduction"] == "none":
        attrs["reduction"] = "sum"
    turned = d.flag()
    matrix = (width, classes) if turned else (classes, width)
    operands = [d.signed(rows, width), labels, d.real(*matrix)]
    operands += [d.real(classes)] if d.flag() else []
    numbers = {"chunks": d.of(0, 1, 2, 3), "scale": d.of(1.0, 0.5), "cap": d.of(None, 2.0)}
    return tuple(operands), {**attrs, **numbers, **({"transposed": True} if turned else {})}


def _cross_entropy(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    rows, classes = d.size(), d.of(3, 4, 7, 8, 12)
    labels = d.ids(classes, rows)
    if rows > 1 and d.flag():
        labels[0] = -100
    return (d.signed(rows, classes), labels), {
        "ignore_index": -100,
        "reduction": d.of("mean", "sum", "none"),
        "label_smoothing": d.of(0.0, 0.0, 0.1),
    }


def _ctc_loss(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Some targets are longer than their inputs: infinite, unless such are taken for zero. One is
    as long as any may be: by it PyTorch sizes what it keeps."""
    del kind
    times, samples, classes, longest = d.of(4, 5, 7), d.size(), d.of(3, 4, 6), d.small()
    infinite = d.flag()
    blank = d.of(0, 0, classes - 1)
    targets = d.ids(classes - 1, samples, longest) + (blank == 0)
    wanted = d.ids(longest + 1, samples)
    wanted[-1] = longest
    given = d.ids(2, samples) + times - 1 if infinite else torch.full((samples,), 2 * longest + 1)
    times = times if infinite else 2 * longest + 1
    log_probs = d.real(times, samples, classes, gradient=True)
    operands = (log_probs, targets, given, wanted)
    return operands, {"blank": blank, "zero_infinity": infinite}


def _logic(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.bits(*shape), d.bits(*d.broadcast(shape))), {}


def _where(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    given = d.of("ab", "a", "b")
    attrs = {n: d.of(0.0, -2.0) for n in "ab" if n not in given}
    values = [d.real(*d.broadcast(shape)) for _ in given]
    return (d.bits(*shape), *values), attrs


def _masked_fill(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape), d.bits(*d.broadcast(shape))), {"value": d.of(0.0, -9.0)}


def _reshape(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Dims merged, dims split, or both across each other."""
    del kind
    old = [d.size() for _ in range(d.of(1, 2, 3))]
    total = 1
    for n in old:
        total *= n
    new: list[int] = []
    while total > 1 and len(new) < 3:
        new.append(d.of(*[n for n in range(1, total + 1) if total % n == 0]))
        total //= new[-1]
    return (d.real(*old),), {"shape": (*new, total)}


def _expand(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*d.broadcast(shape)),), {"shape": shape}


def _slice(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim = d.dim(shape)
    start, step = d.of((0, 1), (0, 1), (1, 1), (0, 2))
    return (d.real(*shape),), {"dim": dim, "start": start, "stop": shape[dim], "step": step}


def _select(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape),), {"dim": d.dim(shape), "index": d.of(0, -1)}


def _split(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim = d.dim(shape)
    squeeze = d.flag()
    size = shape[dim]
    sizes = (1,) * size if squeeze else (size // 2, size - size // 2) if size > 1 else (1,)
    return (d.real(*shape),), {"dim": dim, "sizes": sizes, "squeeze": squeeze}


def _cat(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim = d.dim(shape)
    shapes = [list(shape) for _ in range(d.of(1, 2, 3))]
    for s in shapes:
        s[dim] = d.size()
    return tuple(d.real(*s) for s in shapes), {"dim": dim}


def _stack(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape(1, 2)
    return tuple(d.real(*shape) for _ in range(d.of(2, 3))), {"dim": d.dim((*shape, 1))}


def _pad(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    pairs = tuple(d.of((0, 0), (1, 0), (2, 1)) for _ in shape)
    return (d.real(*shape),), {"low_high": pairs, "value": d.of(0.0, 1.0)}


def _shifted(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    shape = d.shape()
    dims = d.dims(shape)
    extra = {"shifts": tuple(d.of(1, -1) for _ in dims)} if kind == "roll" else {}
    return (d.real(*shape),), {"dims": dims, **extra}


def _transpose(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape),), {"dims": tuple(d.data.draw(st.permutations(range(len(shape)))))}


def _reduction(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    shape = tuple(n + 1 for n in d.shape())
    x = d.bits(*shape) if kind in ("any", "all") else d.real(*shape)
    attrs: dict[str, Any] = {"dims": d.dims(shape), "keepdim": d.flag()}
    if kind == "argmax":
        attrs = {"dim": d.of(None, d.dim(shape)), "keepdim": False}
    if kind == "var":
        attrs["correction"] = d.of(0, 1)
    if kind == "amax" and len(attrs["dims"]) == 1 and d.flag():
        attrs["one"] = True
    return (x,), attrs


def _fourier(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = tuple(n + 1 for n in d.shape())
    name = d.of("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    pairs = name in ("irfft", "hfft") or (name in ("fft", "ifft") and d.flag())
    dims = d.dims(shape) if d.flag() else (d.of(*range(len(shape))),)
    function = name if len(dims) == 1 and d.flag() else f"{name}n"
    given = name in ("irfft", "hfft") and d.flag()
    sizes = tuple(shape[i] + d.of(-1, 0, 2) for i in dims) if given else None
    settings = {"transform": function, "dims": dims, "sizes": sizes, "norm": d.of(None, "ortho")}
    return (d.real(*shape, *[2] * pairs),), {**settings, "pairs": pairs}


def _running(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape),), {"dim": d.dim(shape)}


def _best(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim = d.dim(shape)
    return (d.real(*shape),), {"k": d.of(1, shape[dim]), "dim": dim}


def _made(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    if kind == "full":
        return (), {"shape": d.shape(), "value": 3.0, "dtype": "float64"}
    if kind == "noise":
        drawn = {"distribution": "uniform", "given": (0.0, 1.0)}
        return (), {"shape": d.shape(), "dtype": "float64", **drawn}
    if kind == "arange":
        return (), {"start": 0, "stop": d.size(), "step": 1, "dtype": "int64"}
    return (), {"value": ((1.0, 2.0), (3.0, 4.0)), "dtype": "float64"}


def _written(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape, gradient=False), d.real(*shape, gradient=False)), {}


def _triangle(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    return (d.real(*d.shape(2, 3)),), {"diagonal": d.of(-1, 0, 1)}


def _gather(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    shape = d.shape()
    dim = d.dim(shape)
    smaller = [n if d.flag() else max(n - 1, 1) for n in shape]
    if kind == "gather":
        smaller[dim] = d.size()
        return (d.real(*shape), d.ids(shape[dim], *smaller)), {"dim": dim}
    # Different targets for different sources, so that the result does not depend on order.
    smaller[dim] = max(shape[dim] - 1, 1)
    places = torch.arange(smaller[dim]).view(
        [-1 if i == dim % len(shape) else 1 for i in range(len(shape))]
    )
    source = d.real(*smaller)
    return (d.real(*shape), places.expand(smaller).clone(), source), {"dim": dim}


def _index_select(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim = d.dim(shape)
    return (d.real(*shape), d.ids(shape[dim], d.size())), {"dim": dim}


def _place_rows(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Samples with as many rows each as they have places; masks of one dim too."""
    del kind
    samples, tokens, rest = d.size(), d.small(), d.shape(0, 2)
    each = d.of(*range(1, tokens + 1))
    order = torch.rand(samples, tokens, generator=d.generator).argsort(1)
    mask, rows = order < each, d.real(samples * each, *rest)
    x = d.real(samples, tokens, *rest)
    if d.flag():
        return (x, mask, rows), {}
    flat = x.detach().reshape(-1, *rest).requires_grad_(x.requires_grad)
    return (flat, mask.reshape(-1), rows), {}


def _row_places(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    samples, tokens = d.size(), d.small()
    count = d.of(*range(1, tokens + 1))
    order = torch.rand(samples, tokens, generator=d.generator).argsort(1)
    return (order < count,), {"count": count}


def _index(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape(2, 3)
    dims = d.dims(shape)
    common = d.shape(1, 2)
    indices = [
        d.ids(shape[i], *(common if d.flag() else d.broadcast(common)[-1:] or (1,))) for i in dims
    ]
    return (d.real(*shape), *indices), {"dims": dims}


def _image(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    x = d.real(d.size(), d.size(), d.of(4, 6), d.of(4, 5))
    if kind == "adaptive_avg_pool":
        return (x,), {"output": d.of((1, 1), (2, 2))}
    if kind == "interpolate":
        return (x,), {"output": (7, 7), "mode": d.of("nearest", "bilinear")}
    return (x,), {"kernel": (2, 2), "stride": (d.of(1, 2),) * 2, "padding": (d.of(0, 1),) * 2}


def _baddbmm(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    added = (b, d.of(1, m), n)
    return (d.real(*added), d.real(b, m, k), d.real(b, k, n)), {
        "torch": {"args": ("%0", "%1", "%2"), "kwargs": {"beta": 1.0, "alpha": 0.5}}
    }


def _along(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Calls along a dim that is an argument, or the last one where there is no argument."""
    shape = d.shape()
    dim = d.of(None, d.dim(shape))
    # The dim's place is taken by what stands before it.
    before = ("%0", 1) if kind in ("aten::diff", "aten::topk") else ("%0",)
    call = {"args": before if dim is None else (*before, dim), "kwargs": {}}
    operands = [d.real(*shape)]
    if kind == "aten::diff":
        ahead = list(shape)
        ahead[-1 if dim is None else dim] = d.small()
        operands.append(d.real(*ahead))
        call = {"args": ("%0", 1, -1 if dim is None else dim, "%1"), "kwargs": {}}
    return tuple(operands), {"torch": call}


def _call(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The attrs of an op that has no kind: the call, operands as ``"%0"``."""
    return {"torch": {"args": args, "kwargs": kwargs}}


def _function(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    shape = d.shape()
    if kind == "aten::logaddexp":
        return (d.real(*shape), d.real(*d.broadcast(shape))), _call("%0", "%1")
    if kind == "aten::lerp":
        others = [d.real(*d.broadcast(shape)) for _ in range(1 + d.flag())]
        return (d.real(*shape), *others), _call("%0", "%1", "%2" if len(others) > 1 else 0.3)
    return (d.real(*shape),), _call("%0")


def _pointwise_loss(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Input and target between 0 and 1, never equal; the call without its reduction."""
    shape = d.shape()
    x, y = (d.real(*shape, gradient=False) * 0.4 + low for low in (0.0, 0.49))
    operands = [x.requires_grad_(), y.requires_grad_(d.flag())]
    if kind == "aten::binary_cross_entropy_with_logits" and d.flag():
        operands.append(d.real(shape[-1], gradient=False))
        return tuple(operands), _call("%0", "%1", None, "%2", reduction=0)
    if kind == "aten::binary_cross_entropy":
        y.requires_grad_(False)
    return tuple(operands), _call("%0", "%1", reduction=0)


def _cosine(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape(2, 3)
    return (d.real(*shape), d.real(*shape)), _call("%0", "%1", d.dim(shape))


def _norm(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape),), _call("%0", d.of(1, 2), list(d.dims(shape)), d.flag())


def _prelu(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape(2, 3)
    return (d.signed(*shape), d.real(d.of(1, shape[1]))), _call("%0", "%1")


def _cumprod(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    return (d.real(*shape),), _call("%0", d.dim(shape))


def _scatter_sum(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim, size = d.dim(shape) % len(shape), d.size()
    result = tuple(size if i == dim else n for i, n in enumerate(shape))
    return (d.real(*shape), d.ids(size, *shape)), {"dim": dim, "shape": result}


def _slice_scatter(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape()
    dim = d.dim(shape) % len(shape)
    start, step = min(d.of(0, 1), shape[dim] - 1), d.of(1, 2, 3)
    part = len(range(start, shape[dim], step))
    source = d.real(*shape[:dim], part, *shape[dim + 1 :])
    return (d.real(*shape), source), _call("%0", "%1", dim, start, shape[dim], step)


def _diagonal(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = d.shape(2, 3)
    if d.flag():
        return (d.real(*shape),), _call("%0")
    return (d.real(*shape),), _call("%0", d.of(0, 1), -1, dim2=0)


def _glu(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    shape = [d.size(), d.size(), d.size()]
    dim = d.dim(shape)
    shape[dim] *= 2
    return (d.real(*shape),), _call("%0", dim)


def _conv_transpose(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    space = int(kind[-2])
    groups, c, o = d.of(1, 1, 2), d.of(2, 4), d.of(1, 2, 4)
    x = d.real(d.size(), c, *[3] * space, gradient=True)
    weight = d.real(c, o, *[2] * space, gradient=True)
    bias = [d.real(o * groups)] if d.flag() else []
    ones, zeros = [1] * space, [0] * space
    stride = [d.of(1, 2)] * space
    given = "%2" if bias else None
    return (x, weight, *bias), _call("%0", "%1", given, stride, zeros, zeros, groups, ones)


def _resized(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    space = int(kind[-2])
    x = d.real(d.size(), d.size(), *[3] * space)
    corners = () if "nearest" in kind else (d.flag(),)
    return (x,), _call("%0", [5] * space, *corners)


def _patches(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    x = d.real(d.size(), 4, 4, 4)
    if kind == "aten::im2col":
        return (x,), _call("%0", [2, 2], [1, 1], [0, 0], [1, 1])
    return (x,), _call("%0", 2)


def _recurrent(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    gates = {"lstm": 4, "gru": 3}.get(kind.removeprefix("aten::"), 1)
    b, t, wide, h, first = d.size(), d.small(), d.small(), d.small(), d.flag()
    x = d.real(*((b, t, wide) if first else (t, b, wide)), gradient=True)
    states = [d.real(1, b, h) for _ in range(2 if gates == 4 else 1)]
    weights = [d.real(gates * h, n, gradient=True) for n in (wide, h)]
    names = [f"%{i + 1}" for i in range(len(states) + 2)]
    given = names[:-2] if gates == 4 else names[0]
    call = _call("%0", given, names[-2:], False, 1, 0.0, False, False, first)
    return (x, *states, *weights), call


def _cell(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    gates = {"lstm": 4, "gru": 3}.get(kind.removeprefix("aten::").removesuffix("_cell"), 1)
    b, wide, h = d.size(), d.small(), d.small()
    states = [d.real(b, h) for _ in range(2 if gates == 4 else 1)]
    weights = [d.real(gates * h, n, gradient=True) for n in (wide, h)]
    names = [f"%{i + 1}" for i in range(len(states) + 2)]
    given = names[:-2] if gates == 4 else names[0]
    return (d.real(b, wide), *states, *weights), _call("%0", given, *names[-2:])


_ARITHMETIC = (
    "add sub mul div pow maximum minimum remainder floor_divide eq ne lt le gt ge "
    "jax::rem jax::div jax::atan2 jax::igamma jax::igammac"
)
_FUNCTIONS = (
    "neg exp log sqrt rsqrt tanh sigmoid relu gelu silu sin cos abs erf square softplus leaky_relu "
    "elu hardtanh mish reciprocal identity detach clamp isinf isnan sign floor cast dropout "
    "jax::is_finite jax::ceil jax::rint"
)


def _experts(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Some experts have no tokens, and some tokens name one expert twice."""
    del kind
    reads, transposed, bias = d.of("all", "halves", "pairs"), d.flag(), d.flag()
    tokens, routes, count, inner, hidden = d.size(), d.small(), d.small(), d.size(), d.small()
    wide = inner if reads == "all" else 2 * inner
    shapes = [(count, wide, hidden), (count, hidden, inner)]
    up, down = (d.signed(*((s[0], s[2], s[1]) if transposed else s)) for s in shapes)
    operands = [d.real(tokens, hidden), d.ids(count, tokens, routes), d.real(tokens, routes)]
    operands += [up, down, *([d.real(count, wide), d.real(count, hidden)] if bias else [])]
    gate: tuple[Any, ...] = (("silu", (0,), {}), ("mul", (2, 1), {}))
    if reads == "all":
        gate = (("relu", (0,), {}), ("square", (1,), {}))
    elif d.flag():
        gate = (
            ("clamp", (0,), {"min": -0.3, "max": 0.5}),
            ("sigmoid", (2,), {}),
            ("mul", (3, 1), {}),
        )
    return tuple(operands), {"reads": reads, "gate": gate, "transposed": transposed, "bias": bias}


def _feed_forward(d: Draw, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    del kind
    ups, transposed = d.of(1, 2, 3), d.flag()
    width, inner, out = d.small(), d.size(), d.small()
    shapes = [*[(inner, width)] * ups, (out, inner)]
    biases = tuple(place for place in range(ups) if d.flag())
    gates: Mapping[int, tuple[Any, ...]] = {
        1: (("relu", (0,), {}), ("square", (1,), {})),
        2: (("silu", (0,), {}), ("mul", (2, 1), {})),
        3: (("sigmoid", (1,), {}), ("mul", (0, 3), {}), ("add", (4, 2), {})),
    }
    operands = [d.signed(*d.shape(1, 2), width)]
    operands += [d.signed(*(shape[::-1] if transposed else shape)) for shape in shapes]
    operands += [d.real(inner) for _ in biases]
    attrs = {"ups": ups, "biases": biases, "gate": gates[ups], "transposed": transposed}
    return tuple(operands), {**attrs, "chunks": d.of(0, 1, 2, 3)}


CASES: Mapping[str, Builder] = {
    "feed_forward": _feed_forward,
    "experts": _experts,
    **dict.fromkeys(_ARITHMETIC.split(), _two),
    **dict.fromkeys(_FUNCTIONS.split(), _one),
    **dict.fromkeys(JAX_FUNCTIONS, _in_domain),
    "jax::clamp": _between,
    **dict.fromkeys(("and", "or", "xor"), _logic),
    "not": lambda d, kind: ((d.bits(*d.shape()),), {}),
    "linear": _linear,
    "linear_t": _linear,
    "matmul": _matmul,
    "grouped_linear": _grouped_linear,
    "einsum": _einsum,
    "conv": _conv,
    "attention": _attention,
    "rotary": _rotary,
    "repeat_heads": lambda d, kind: (
        (d.real(d.size(), d.size(), d.small(), d.small()),),
        {"repeats": d.of(1, 2, 3, 4)},
    ),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "ctc_loss": _ctc_loss,
    "gated_activation": lambda d, kind: (
        (lambda shape: (d.signed(*shape), d.signed(*shape)))(d.shape()),
        {"activation": d.of("silu", "gelu_tanh"), "kernel": "triton"},
    ),
    "where": _where,
    "masked_fill": _masked_fill,
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
    "flip": _shifted,
    "roll": _shifted,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "argmax", "var"), _reduction),
    "torch::fft": _fourier,
    "cumsum": _running,
    "jax::top_k": _best,
    **LAX_CASES,
    **dict.fromkeys(("full", "arange", "constant", "noise"), _made),
    "carry": _written,
    **dict.fromkeys(("tril", "triu"), _triangle),
    "gather": _gather,
    "scatter": _gather,
    "scatter_sum": _scatter_sum,
    "index_select": _index_select,
    "index": _index,
    "place_rows": _place_rows,
    "row_places": _row_places,
    "one_hot": lambda d, kind: ((d.ids(5, *d.shape()),), {"classes": 5}),
    **{
        f"aten::{name}": _function
        for name in (
            "log_sigmoid hardswish hardsigmoid selu celu expm1 exp2 log2 log10 tan logaddexp lerp "
            "atan round ceil trunc isfinite"
        ).split()
    },
    **{
        f"aten::{name}": _pointwise_loss
        for name in (
            "smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits"
        ).split()
    },
    "aten::cosine_similarity": _cosine,
    "aten::view_as_real": lambda d, kind: (
        (torch.view_as_complex(d.real(*d.shape(), 2, gradient=False)),),
        _call("%0"),
    ),
    "aten::cumprod": _cumprod,
    "aten::slice_scatter": _slice_scatter,
    "aten::diagonal": _diagonal,
    "aten::glu": _glu,
    "aten::linalg_vector_norm": _norm,
    "aten::prelu": _prelu,
    **{f"aten::conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)},
    **{
        f"aten::upsample_{name}": _resized
        for name in (
            "nearest1d nearest2d nearest3d linear1d bilinear2d trilinear3d bicubic2d"
        ).split()
    },
    **dict.fromkeys(("aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::im2col"), _patches),
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), _recurrent),
    **{f"aten::{name}_cell": _cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **TORCH_CASES,
    "aten::baddbmm": _baddbmm,
    **{f"aten::{name}": _along for name in ("argsort", "diff", "sort", "topk")},
    **dict.fromkeys(("max_pool", "avg_pool", "adaptive_avg_pool", "interpolate"), _image),
}
