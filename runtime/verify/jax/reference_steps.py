"""Steps of the user's own function on one device: differentiated by JAX, in float64, with an
optimizer written down again; and what rounding alone changes of what they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontends.jax import paths_of
from autopar.nouns.workload import Workload
from autopar.runtime.jax.parallel import by_name
from autopar.runtime.verify.jax.errors import apart, norm_of_all
from autopar.runtime.verify.jax.record import Named, Record, in_float64, in_numpy
from autopar.runtime.verify.jax.reference import reference_of
from autopar.runtime.verify.verified import NEGLIGIBLE

MEASUREMENTS = 2
"""How often rounding is measured: that of a single number may be small by chance."""


def reference(
    workload: Workload,
    params: Any,
    batches: list[dict[str, Any]],
    stacks: Mapping[str, tuple[str, ...]],
) -> Record:
    """Steps of the user's own function on one device, in float64; ``params`` and ``batches`` in the
    dtypes that the user gives them, 64-bit types enabled."""
    assert workload.loss is not None
    has_aux = workload.has_aux
    given = reference_of(workload.loss, params, batches[0], has_aux)

    def run(params: Any, batch: Mapping[str, Any]) -> Any:
        made, gradients = given.function(params, batch)
        return made if has_aux else (made, ()), gradients

    function = jax.jit(run)
    record = Record(unchecked=given.unchecked)
    params = jax.tree.map(lambda a: in_float64(np.asarray(a)), params)
    batches = [{n: in_float64(np.asarray(a)) for n, a in b.items()} for b in batches]
    before = _named(params, stacks)
    slots: dict[str, Named] = {"m": {}, "v": {}}
    structure = jax.tree.structure(params)
    paths = [path for path, _ in paths_of(params)]
    for number, batch in enumerate(batches, 1):
        (loss, beside), gradients = function(params, batch)
        record.losses.append(float(loss))
        record.outputs.append(in_numpy(dict(paths_of(beside))))
        flat = {path: np.asarray(g) for path, g in paths_of(gradients)}
        record.gradients.append(by_name(flat.items(), stacks))
        known = record.gradients[-1], record.outputs[-1]
        noise, beside = _noise(function, params, batch, *known, stacks)
        record.noise.append(noise)
        record.output_noise.append(beside)
        if workload.clip_norm is not None:
            norm = math.sqrt(sum(float(np.square(g).sum()) for g in flat.values()))
            factor = min(1.0, workload.clip_norm / (norm + 1e-6))
            flat = {path: g * factor for path, g in flat.items()}
        weights = {path: np.asarray(p) for path, p in paths_of(params)}
        for path, weight in weights.items():
            weights[path] = _updated(workload, number, path, weight, flat[path], slots)
        params = jax.tree.unflatten(structure, [jnp.asarray(weights[p]) for p in paths])
    record.weights = _named(params, stacks)
    record.moved = {n: float(np.linalg.norm(record.weights[n] - p)) for n, p in before.items()}
    return record


def _noise(
    function: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Any],
    gradients: Named,
    outputs: Named,
    stacks: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Norm of what rounding changes of the gradients that are small beside the whole one, and of
    what is beside the loss: weights and batch are off by one unit in their last place."""
    norms = {n: float(np.linalg.norm(g)) for n, g in gradients.items()}
    least = NEGLIGIBLE * norm_of_all(gradients)
    noise = {n: 0.0 for n, norm in norms.items() if 0 < norm < least}
    beside = dict.fromkeys(outputs, 0.0)
    draws = np.random.default_rng(0)

    def moved(a: Any) -> Any:
        if a.dtype != np.float64:
            return a
        return a * (1 + np.finfo(np.float64).eps * draws.choice((-1.0, 1.0), a.shape))

    for _ in range(MEASUREMENTS if noise or beside else 0):
        near = jax.tree.map(moved, params), {n: moved(a) for n, a in batch.items()}
        (_, others), changed = function(*near)
        named = _named(changed, stacks)
        for name in noise:
            noise[name] = max(noise[name], float(np.linalg.norm(named[name] - gradients[name])))
        for name, array in paths_of(others):
            beside[name] = max(beside[name], apart(np.asarray(array), outputs[name]))
    return noise, beside


def _updated(
    workload: Workload,
    number: int,
    path: str,
    weight: np.ndarray,
    gradient: np.ndarray,
    slots: dict[str, Named],
) -> np.ndarray:
    rate, decay = workload.learning_rate, workload.weight_decay
    if workload.optimizer == "sgd":
        return np.asarray(weight - rate * (gradient + decay * weight))
    first, second = workload.betas
    m = slots["m"].get(path, 0.0) * first + gradient * (1 - first)
    v = slots["v"].get(path, 0.0) * second + np.square(gradient) * (1 - second)
    slots["m"][path], slots["v"][path] = m, v
    direction = (m / (1 - first**number)) / (np.sqrt(v / (1 - second**number)) + workload.eps)
    return np.asarray(weight - rate * decay * weight - rate * direction)


def _named(tree: Any, stacks: Mapping[str, tuple[str, ...]]) -> Named:
    """Parameters by full name. Layers are cut apart by numpy: JAX compiles every cut."""
    return by_name(((path, np.asarray(a)) for path, a in paths_of(tree)), stacks)
