"""What a graph means, in plain jnp: derivatives are tried by it, and tests compare with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontends.jax.calls import evaluated, widened_call
from autopar.frontends.jax.draft import NARROW
from autopar.frontends.jax.errors import CaptureError
from autopar.nouns.graph import Graph, Op
from autopar.nouns.kinds import (
    BODIES,
    CARRIED,
    LENGTH,
    OWN_DERIVATIVE,
    REVERSE,
    SCAN,
    STACKED,
    SWITCH,
    TAKES,
)
from autopar.nouns.text.graph import from_text, to_text
from autopar.rules.advice import unwritable
from autopar.rules.called import is_called
from autopar.rules.lax_calls import LAX_CALLS

Arrays = Mapping[str, Any]


def results_of(graph: Graph, wide: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The function of a graph without parameters: its inputs, in order, to its outputs."""
    if wide:
        graph = widened(graph)

    def function(*operands: Any) -> tuple[Any, ...]:
        env = dict(zip(graph.inputs, operands, strict=True))
        run(graph, env, graph, {})
        return tuple(env[name] for name in graph.outputs)

    return function


def flat_parameters(tree: Any, stacks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The leaves of a parameter tree under the names that the graph gives them."""
    from autopar.frontends.jax.inputs import paths_of

    flat: dict[str, Any] = {}
    for path, leaf in paths_of(tree):
        if path in stacks:
            flat.update((name, leaf[i]) for i, name in enumerate(stacks[path]))
        else:
            flat[path] = leaf
    return flat


def widened(graph: Graph) -> Graph:
    """The graph in float64 wherever an op of it asks for a narrower float."""

    def op(declared: Op) -> Op:
        if declared.attrs.get("dtype") in NARROW:
            return replace(declared, attrs={**declared.attrs, "dtype": "float64"})
        if is_called(declared):
            return replace(declared, attrs=widened_call(declared.attrs))
        if BODIES in declared.attrs:
            bodies = tuple(to_text(widened(from_text(body))) for body in declared.attrs[BODIES])
            return replace(declared, attrs={**declared.attrs, BODIES: bodies})
        if declared.kind.startswith(OWN_DERIVATIVE):
            parts = {n: from_text(declared.attrs[n]) for n in ("forward", "backward")}
            texts = {n: to_text(widened(part)) for n, part in parts.items()}
            return replace(declared, attrs={**declared.attrs, **texts})
        return declared

    blocks = {n: replace(b, body=widened(b.body)) for n, b in graph.blocks.items()}
    return replace(graph, ops=tuple(map(op, graph.ops)), blocks=blocks)


def run(graph: Graph, env: dict[str, Any], whole: Graph, params: Arrays) -> None:
    """Adds what the ops of ``graph`` make to ``env``, arrays by name.

    whole:  the graph that has the blocks.
    params: by full name, of the layers of blocks.
    """
    for op in graph.ops:
        inputs = [env[name] for name in op.inputs]
        if op.kind == "block":
            block = whole.blocks[op.attrs["block"]]
            inner = dict(zip(block.body.inputs, inputs, strict=True))
            for name, tensor in block.body.tensors.items():
                if tensor.role in ("parameter", "buffer"):
                    inner[name] = params[f"{op.attrs['instance']}.{name}"]
            run(block.body, inner, whole, params)
            results: Any = [inner[name] for name in block.body.outputs]
        elif op.kind == "split":
            cuts = [sum(op.attrs["sizes"][: i + 1]) for i in range(len(op.attrs["sizes"]) - 1)]
            results = jnp.split(inputs[0], cuts, axis=op.attrs["dim"])
        elif op.kind in LAX_CALLS:
            results = _called(op, inputs)
        elif is_called(op):
            results = evaluated(op.attrs, inputs, graph.tensors[op.name].shape)
        elif BODIES in op.attrs:
            results = _of_bodies(op, inputs)
        elif op.kind == "jax::top_k":
            results = _top_k(inputs[0], op.attrs["k"], op.attrs["dim"])
        elif op.kind.startswith(OWN_DERIVATIVE):
            results = _own_derivative(op.attrs)(*inputs)
        else:
            results = [_evaluate(op, inputs)]
        env.update(zip(op.outputs, results, strict=True))


def _of_bodies(op: Op, operands: Sequence[Any]) -> Sequence[Any]:
    """Of a branch, a loop or a scan."""
    functions = [results_of(from_text(text)) for text in op.attrs[BODIES]]
    takes = op.attrs[TAKES]
    if op.kind == SWITCH:
        return jax.lax.switch(operands[0], functions, *(operands[i] for i in takes[0]))  # type: ignore[no-any-return]
    carried = op.attrs[CARRIED]
    if op.kind == SCAN:
        return _scanned(op, functions[0], operands)
    fixed = [[operands[i] for i in some if i not in carried] for some in takes]
    goes_on, step = functions
    return jax.lax.while_loop(  # type: ignore[no-any-return]
        lambda carry: goes_on(*fixed[0], *carry)[0],
        lambda carry: step(*fixed[1], *carry),
        tuple(operands[i] for i in carried),
    )


def _scanned(op: Op, step: Callable[..., Any], operands: Sequence[Any]) -> Sequence[Any]:
    carried, stacked = op.attrs[CARRIED], op.attrs[STACKED]
    fixed = [x for i, x in enumerate(operands) if i not in carried and i not in stacked]

    def run(carry: Any, rows: Any) -> Any:
        made = step(*fixed, *carry, *rows)
        return made[: len(carried)], made[len(carried) :]

    begin, rows = (tuple(operands[i] for i in some) for some in (carried, stacked))
    length = None if rows else op.attrs[LENGTH]
    last, made = jax.lax.scan(run, begin, rows, length, reverse=op.attrs[REVERSE])
    return [*last, *made]


def _called(op: Op, operands: Sequence[Any]) -> Sequence[Any]:
    call = LAX_CALLS[op.kind]
    given = [tuple(operands)] if call.together else [*operands]
    results = _named(call.function)(*given, *map(_named, call.behind), **op.attrs)
    return results if isinstance(results, tuple | list) else [results]


def _named(text: str) -> Any:
    """What a program means by ``jnp.inf`` or ``lax.max``, or by a number."""
    if text.startswith("-"):
        return -_named(text[1:])
    if text[0].isdigit():
        return float(text)
    named: Any = {"lax": jax.lax, "jnp": jnp}[text.partition(".")[0]]
    for name in text.split(".")[1:]:
        named = getattr(named, name)
    return named


def _top_k(x: Any, k: int, dim: int) -> list[Any]:
    """Values and places of the ``k`` largest along ``dim``, largest first."""
    values = jax.lax.top_k(jnp.moveaxis(x, dim, -1), k)
    return [jnp.moveaxis(one, -1, dim) for one in values]


def _own_derivative(attrs: Mapping[str, Any]) -> Any:
    forward, backward = (results_of(from_text(attrs[n])) for n in ("forward", "backward"))
    function = jax.custom_vjp(forward)

    def pull(x: tuple[Any, ...], g: tuple[Any, ...]) -> tuple[Any, ...]:
        gradients = dict(zip(attrs["gradients"], backward(*x, *g), strict=True))
        return tuple(gradients.get(i) for i in range(len(x)))

    function.defvjp(lambda *x: (forward(*x), x), pull)
    return function


def _evaluate(op: Op, x: Sequence[Any]) -> Any:
    if op.kind in _TWO:
        other = op.attrs.get("other")
        if other is None:
            return _TWO[op.kind](*x)
        pair = (other, x[0]) if op.attrs.get("scalar_first") else (x[0], other)
        return _TWO[op.kind](*pair)
    if op.kind in _ONE:
        return _ONE[op.kind](x[0])
    if op.kind in _REDUCE:
        return _REDUCE[op.kind](x[0], axis=op.attrs["dims"], keepdims=op.attrs["keepdim"])
    if why := unwritable(op):
        raise CaptureError(
            f"{op.source}: {op.kind} cannot be called again, since {why}; the derivative of the "
            "function that it stands in is tried by that: write it with jnp functions that autopar "
            "knows, or make it outside of the loss"
        )
    if op.kind.startswith("jax::"):
        return getattr(jax.lax, op.kind.removeprefix("jax::"))(*x)
    return _OTHER[op.kind](op.attrs, *x)


_TWO: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "pow": jnp.power,
    "maximum": jnp.maximum, "minimum": jnp.minimum, "eq": jnp.equal, "ne": jnp.not_equal,
    "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal,
    "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor,
    "jax::rem": jnp.fmod, "jax::div": jax.lax.div,
    "linear": lambda x, w: x @ w.T, "linear_t": jnp.matmul, "matmul": jnp.matmul,
}  # fmt: skip

_ONE: Mapping[str, Callable[[Any], Any]] = {
    "neg": jnp.negative, "exp": jnp.exp, "log": jnp.log, "sqrt": jnp.sqrt, "rsqrt": jax.lax.rsqrt,
    "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid, "sin": jnp.sin, "cos": jnp.cos, "abs": jnp.abs,
    "not": jnp.invert, "erf": jax.lax.erf, "square": jnp.square, "sign": jnp.sign,
    "floor": jnp.floor, "detach": jax.lax.stop_gradient, "relu": jax.nn.relu,
    "silu": jax.nn.silu, "softplus": jax.nn.softplus,
    "jax::is_finite": jnp.isfinite, "jax::rint": jnp.rint, "identity": lambda x: x,
}  # fmt: skip

_REDUCE: Mapping[str, Callable[..., Any]] = {
    "sum": jnp.sum, "mean": jnp.mean, "amax": jnp.max, "amin": jnp.min, "any": jnp.any,
    "all": jnp.all,
}  # fmt: skip


def _grouped_linear(attrs: Mapping[str, Any], x: Any, index: Any, weight: Any) -> Any:
    del attrs
    inside = (index >= 0) & (index < weight.shape[0])
    made = jnp.einsum("nk,nkm->nm", x, weight[jnp.where(inside, index, 0)])
    return jnp.where(inside[:, None], made, 0)


def _experts(attrs: Mapping[str, Any], x: Any, index: Any, weights: Any, *matrices: Any) -> Any:
    rows, flat = jnp.repeat(x, index.shape[1], axis=0), index.reshape(-1)
    *first, last = matrices
    values = [_grouped_linear({}, rows, flat, matrix) for matrix in first]
    for kind, operands, more in attrs["gate"]:
        values.append(_evaluate(Op(kind, (), ("",), more), [values[i] for i in operands]))
    made = _grouped_linear({}, values[-1], flat, last)
    return jnp.einsum("nkd,nk->nd", made.reshape(*index.shape, -1), weights)


def _attention(attrs: Mapping[str, Any], q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    b, h, s, d = q.shape
    g, t = k.shape[1:3]
    scale = d**-0.5 if attrs["scale"] is None else attrs["scale"]
    q = q.reshape(b, g, h // g, s, d)
    logits = jnp.einsum("bgrsd,bgtd->bgrst", q, k) * scale
    if attrs["causal"]:
        seen = jnp.tril(jnp.ones((s, t), bool))
        seen &= ~jnp.tril(seen, -attrs.get("window", s + t))
        logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
    if mask is not None:
        shape = (b, h, s, t)
        mask = jnp.broadcast_to(mask, shape).reshape(b, g, h // g, s, t)
        if mask.dtype == jnp.bool_:
            logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
        else:
            logits = logits + mask
    mixed = jnp.einsum("bgrst,bgtd->bgrsd", jax.nn.softmax(logits, axis=-1), v)
    return mixed.reshape(b, h, s, d)


def _layer_norm(attrs: Mapping[str, Any], x: Any, weight: Any = 1.0, bias: Any = 0.0) -> Any:
    dims = tuple(range(-attrs["dims"], 0))
    mean = x.mean(dims, keepdims=True)
    variance = jnp.square(x - mean).mean(dims, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + attrs["eps"]) * weight + bias


def _rms_norm(attrs: Mapping[str, Any], x: Any, weight: Any = None) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if attrs["upcast"] else x
    y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + attrs["eps"])
    y = y.astype(x.dtype)
    return y if weight is None else y * (attrs["scale_offset"] + weight)


def _cross_entropy(attrs: Mapping[str, Any], logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    if attrs.get("zero_outside"):
        inside = (labels >= 0) & (labels < logits.shape[-1])
        picked = jnp.where(inside[:, None], picked, 0)
    return -picked.mean() if attrs["reduction"] == "mean" else -picked.sum()


def _where(attrs: Mapping[str, Any], condition: Any, *rest: Any) -> Any:
    values = list(rest)
    a = attrs["a"] if attrs.get("a") is not None else values.pop(0)
    b = attrs["b"] if attrs.get("b") is not None else values.pop(0)
    return jnp.where(condition, a, b)


def _bounds(attrs: Mapping[str, Any], x: Any) -> tuple[Any, Any, Any]:
    return jnp.asarray(attrs["min"], x.dtype), x, jnp.asarray(attrs["max"], x.dtype)


def _slice(attrs: Mapping[str, Any], x: Any) -> Any:
    return jax.lax.slice_in_dim(x, attrs["start"], attrs["stop"], attrs["step"], attrs["dim"])


def _conv(attrs: Mapping[str, Any], x: Any, weight: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        weight,
        attrs["stride"],
        attrs["padding"],
        rhs_dilation=attrs["dilation"],
        feature_group_count=attrs["groups"],
    )


_OTHER: Mapping[str, Callable[..., Any]] = {
    "einsum": lambda a, *xs: jnp.einsum(a["equation"], *xs),
    "conv": _conv,
    "attention": _attention,
    "grouped_linear": _grouped_linear,
    "experts": _experts,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda a, x: jax.nn.softmax(x, axis=a["dim"]),
    "log_softmax": lambda a, x: jax.nn.log_softmax(x, axis=a["dim"]),
    "embedding": lambda a, ids, weight: weight[ids],
    "cross_entropy": _cross_entropy,
    "gelu": lambda a, x: jax.nn.gelu(x, approximate=a["approximate"] == "tanh"),
    "clamp": lambda a, x: jax.lax.clamp(*_bounds(a, x)),
    "cast": lambda a, x: x.astype(a["dtype"]),
    "where": _where,
    "reshape": lambda a, x: x.reshape(a["shape"]),
    "transpose": lambda a, x: x.transpose(a["dims"]),
    "expand": lambda a, x: jnp.broadcast_to(x, a["shape"]),
    "slice": _slice,
    "select": lambda a, x: jnp.take(x, a["index"], axis=a["dim"]),
    "cat": lambda a, *xs: jnp.concatenate(xs, axis=a["dim"]),
    "stack": lambda a, *xs: jnp.stack(xs, axis=a["dim"]),
    "pad": lambda a, x: jnp.pad(x, a["low_high"], constant_values=a["value"]),
    "flip": lambda a, x: jnp.flip(x, a["dims"]),
    "argmax": lambda a, x: jnp.argmax(x, axis=a["dim"]),
    "cumsum": lambda a, x: jnp.cumsum(x, axis=a["dim"]),
    "full": lambda a: jnp.full(a["shape"], a["value"], a["dtype"]),
    "arange": lambda a: jnp.arange(a["start"], a["stop"], a["step"], a["dtype"]),
    "constant": lambda a: jnp.array(a["value"], a["dtype"]),
    "gather": lambda a, x, i: jnp.take_along_axis(x, i, axis=a["dim"]),
    "index_select": lambda a, x, i: jnp.take(x, i, axis=a["dim"]),
}
