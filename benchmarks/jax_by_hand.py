"""Training steps of `benchmarks.jax_models` as a person distributes them, one `jax.shard_map` each.

Data parallel, ZeRO 1 and 3 (Rajbhandari et al. 2020), and Megatron's tensor parallelism with the
vocabulary split (Shoeybi et al. 2019), without and with sequence parallelism (Korthikanti et al.
2022). Nothing of autopar is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from benchmarks.jax_models import (
    attention,
    dropless,
    feed_forward,
    layer_norm,
    linear,
    rms_norm,
    rotary,
)

AXIS = "d"
Tree = Any
Batch = Mapping[str, Any]
ROWS = ("out", "o", "down")
COLUMNS = ("q", "k", "v", "up", "gate")


@dataclass(frozen=True, slots=True)
class Way:
    """How devices share a step.

    samples:    whether they have samples of their own.
    zero:       what of the state is cut: 1 the optimizer's, 3 parameters too.
    tensor:     whether they have columns and rows of products.
    sequence:   whether tokens are split between these too.
    """

    samples: bool = False
    zero: int = 0
    tensor: bool = False
    sequence: bool = False


WAYS: Mapping[str, Way] = {
    "dp": Way(samples=True),
    "zero 1": Way(samples=True, zero=1),
    "zero 3": Way(samples=True, zero=3),
    "megatron": Way(tensor=True),
    "megatron, sequence": Way(tensor=True, sequence=True),
}


def _adjoint(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return function  # type: ignore[no-any-return]


def _sum(x: Any) -> Any:
    return lax.psum(x, AXIS)


def _gather(x: Any, dim: int) -> Any:
    return lax.all_gather(x, AXIS, axis=dim, tiled=True)


def _scatter(x: Any, dim: int) -> Any:
    return lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True)


def _same(x: Any) -> Any:
    return x


def _enter(way: Way) -> Callable[[Any], Any]:
    """In front of products by columns; Megatron's f, under sequence parallelism its g-bar."""
    if way.sequence:
        return _adjoint(partial(_gather, dim=1), partial(_scatter, dim=1))
    return _adjoint(_same, _sum) if way.tensor else _same


def _leave(way: Way) -> Callable[[Any], Any]:
    """Behind products by rows."""
    if way.sequence:
        return _adjoint(partial(_scatter, dim=1), partial(_gather, dim=1))
    return _adjoint(_sum, _same) if way.tensor else _same


def loss(kind: str, heads: int, way: Way, cuts: Tree, params: Tree, batch: Batch) -> Any:
    """This device's share of the loss of its samples, or all of it under tensor parallelism."""
    enter, leave = _enter(way), _leave(way)
    llama = kind in ("llama", "moe")
    block = partial(_llama if llama else _transformer, heads, enter, leave, kind != "vit")
    block = partial(block, router=_router(way)) if kind == "moe" else block
    name = "layers" if llama else "blocks"
    inside = cuts[name][0] if isinstance(cuts[name], list) else cuts[name]

    def unit(piece: Tree, cuts: Tree) -> Tree:
        """All of its parameters; the transpose of gathering reduces and scatters."""
        return jax.tree.map(_gather, piece, cuts) if way.zero == 3 else piece

    def layer(x: Any, p: Tree) -> tuple[Any, None]:
        return block(unit(p, inside), x), None

    if way.zero == 3:  # gathered again for backward
        layer = jax.checkpoint(layer, policy=_not_gathered)
    outer = unit(*({n: p for n, p in tree.items() if n != name} for tree in (params, cuts)))
    layers = params[name]
    if kind == "vit":
        x = _own(linear(outer["patch"], batch["patches"]) + outer["positions"], way)
    else:
        x = leave(_rows(outer["embed"], batch["tokens"], way))
        x = x if llama else x + _own(outer["positions"][None], way)
    if isinstance(layers, list):
        for p in layers:
            x, _ = layer(x, p)
    else:
        x, _ = lax.scan(layer, x, layers)
    if kind == "vit":
        x = layer_norm(outer["norm"], x)
        pooled = x.sum(1) / 196
        pooled = _adjoint(_sum, _same)(pooled) if way.sequence else pooled
        logits, labels = linear(outer["head"], pooled), batch["label"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
        return -picked.mean()
    x = rms_norm(outer["norm"], x) if llama else layer_norm(outer["norm"], x)
    return _entropy(enter(x) @ outer["head"], batch["labels"], way)


def _transformer(heads: int, enter: Any, leave: Any, causal: bool, p: Tree, x: Any) -> Any:
    width = p["norm1"]["w"].shape[-1]
    h = enter(layer_norm(p["norm1"], x))
    q, k, v = (linear(p[n], h).reshape(*h.shape[:2], -1, width // heads) for n in ("q", "k", "v"))
    x = x + leave(attention(q, k, v, causal) @ p["out"]["w"]) + p["out"]["b"]
    h = jax.nn.gelu(linear(p["up"], enter(layer_norm(p["norm2"], x))))
    return x + leave(h @ p["down"]["w"]) + p["down"]["b"]


def _router(way: Way) -> Callable[[Any], Any]:
    """Its gradient is a part on each device that has columns of the experts; of those that have
    tokens of their own it is summed with those of norms."""
    return _adjoint(_same, _sum) if way.tensor and not way.sequence else _same


def _llama(
    heads: int, enter: Any, leave: Any, causal: bool, p: Tree, x: Any, router: Any = None
) -> Any:
    width = p["norm1"].shape[-1]
    h = enter(rms_norm(p["norm1"], x))
    q, k, v = ((h @ p[n]).reshape(*h.shape[:2], -1, width // heads) for n in ("q", "k", "v"))
    x = x + leave(attention(rotary(q), rotary(k), v, causal) @ p["o"])
    h = enter(rms_norm(p["norm2"], x))
    return x + leave(dropless(p, h, router(p["router"])) if router else feed_forward(p, h))


def _own(x: Any, way: Way) -> Any:
    """This device's tokens of what all have."""
    if not way.sequence:
        return x
    size = x.shape[1] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size, 1)


def _rows(weight: Any, ids: Any, way: Way) -> Any:
    """Of a table of which the device has some rows; zero for the others."""
    if not way.tensor:
        return weight[ids]
    place = ids - lax.axis_index(AXIS) * weight.shape[0]
    mine = (place >= 0) & (place < weight.shape[0])
    return jnp.where(mine[..., None], weight[jnp.where(mine, place, 0)], 0.0)


def _entropy(logits: Any, labels: Any, way: Way) -> Any:
    if not way.tensor:
        picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
    most = lax.pmax(lax.stop_gradient(logits.max(-1)), AXIS)
    place = labels - lax.axis_index(AXIS) * logits.shape[-1]
    mine = (place >= 0) & (place < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, place, 0)[..., None], axis=-1)[..., 0]
    parts = jnp.stack(
        [jnp.exp(logits - most[..., None]).sum(-1), jnp.where(mine, picked - most, 0.0)]
    )
    total, label = _adjoint(_sum, _same)(parts)
    return jnp.mean(jnp.log(total) - label)


def _not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return str(primitive.name) != "all_gather"


def _cut(shape: tuple[int, ...], devices: int) -> int:
    """The first dim that so many devices divide."""
    return next(d for d, size in enumerate(shape) if size % devices == 0)


def cuts_of(params: Tree, devices: int) -> Tree:
    """Of each parameter, of stacked ones in a layer, the dim that ZeRO cuts."""
    cuts = {}
    for name, tree in params.items():
        stacked = name in ("layers", "blocks") and isinstance(tree, Mapping)
        cuts[name] = jax.tree.map(lambda p, lead=int(stacked): _cut(p.shape[lead:], devices), tree)
    return cuts


def specs(params: Tree, way: Way, devices: int, cut: bool) -> Tree:
    """How parameters lie; ``cut``: as the optimizer's state."""

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [str(getattr(key, "key", "")) for key in path]
        last = leaf.ndim - 1
        if way.tensor:
            if any(n in COLUMNS for n in names) or ("head" in names and leaf.ndim == 2):
                return _at(last) if "patch" not in names and not _of_vit(params, names) else _at()
            if any(n in ROWS for n in names) and names[-1] != "b":
                return _at(last - 1)
            return _at(0) if "embed" in names else _at()
        stacked = isinstance(params.get("layers", params.get("blocks")), Mapping)
        lead = int(stacked and names[0] in ("layers", "blocks"))
        whole = way.zero == 0 or (way.zero == 1 and not cut)
        return _at() if whole else _at(lead + _cut(leaf.shape[lead:], devices))

    return jax.tree_util.tree_map_with_path(spec, params)


def _of_vit(params: Tree, names: list[str]) -> bool:
    """Whether it is the classifier of images, which Megatron leaves whole."""
    return "patch" in params and names[0] == "head"


def _at(dim: int | None = None) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, AXIS)


def step_of(kind: str, heads: int, way: Way, shapes: Tree, devices: int) -> Any:
    """A jitted training step of (params, m, v, batch), Adam, for parameters of these shapes."""
    mesh = Mesh(jax.devices()[:devices], (AXIS,), axis_types=(AxisType.Auto,))
    held, state = specs(shapes, way, devices, False), specs(shapes, way, devices, True)
    sample = PartitionSpec(AXIS) if way.samples else PartitionSpec()

    def step(params: Tree, m: Tree, v: Tree, batch: Batch) -> Any:
        share = partial(loss, kind, heads, way, cuts_of(shapes, devices))
        value, gradients = jax.value_and_grad(share)(params, batch)
        if way.samples:
            value = _sum(value) / devices
            gradients = jax.tree.map(partial(_reduced, way, devices), gradients, state)
        if way.sequence:  # of norms and biases each device has the part of its tokens
            gradients = jax.tree.map(
                lambda g, s: _sum(g) if s == PartitionSpec() else g, gradients, held
            )
        own = params if way.zero != 1 else jax.tree.map(_piece, params, state)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
        own = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), own, m, v)
        if way.zero == 1:
            own = jax.tree.map(lambda p, s: _gather(p, s.index(AXIS)), own, state)
        return own, m, v, value

    shared = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(held, state, state, sample),
        out_specs=(held, state, state, PartitionSpec()),
        check_vma=False,
    )
    # else XLA keeps gathered parameters for backward on CPUs, where layers are in a Python loop
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"} if way.zero == 3 else None
    return jax.jit(shared, donate_argnums=(0, 1, 2), compiler_options=options)


def _reduced(way: Way, devices: int, gradient: Any, spec: PartitionSpec) -> Any:
    if way.zero == 3:  # backward of gathering has done it
        return gradient / devices
    if way.zero == 1:
        return _scatter(gradient, list(spec).index(AXIS)) / devices
    return _sum(gradient) / devices


def _piece(p: Any, spec: PartitionSpec) -> Any:
    dim = list(spec).index(AXIS)
    size = p.shape[dim] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(p, lax.axis_index(AXIS) * size, size, dim)


def wire_bytes(kind: str, size_bytes: int, devices: int) -> float:
    """What a device sends for a collective of ``size_bytes`` (the full-size side) by a ring."""
    share = (devices - 1) / devices * size_bytes
    return 2 * share if kind == "all_reduce" else share
