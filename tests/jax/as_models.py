"""Calls of functions of JAX as small models, captured, and under stages that are drawn.

What a function is called with has samples in front, or is a parameter. Behind each float of the
batch stands a parameter, zero at first, which a second entry weighs: equal numbers stay equal, and
a gradient that goes to another one of them is wrong. The loss is made of all that the call makes,
each entry weighed by its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.emit.jax import emit
from autopar.frontends.jax import Captured
from autopar.frontends.jax.capture import capture_workload
from autopar.nouns.errors import UserError
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.planner.planning import PlanResult
from autopar.runtime.verify.verified import TOLERANCE
from tests.emit.decided import decided
from tests.emit.random_stage import random_stage
from tests.jax.interpreter import compare
from tests.jax.planned import Made
from tests.outcomes import Outcome, crash
from tests.plans import cluster

BATCH = 8
STAGES = (
    (Mesh(("dp_replicate", "tp"), (2, 2)), 0),
    (Mesh(("tp",), (4,)), 0),
    (Mesh(("dp_replicate", "tp"), (2, 2)), 1),
    (Mesh(("tp",), (2,)), 1),
)
"""Meshes, and what a stage there is drawn by."""
Numbers = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Call:
    """``function`` of operands: ``entries`` have samples in front, ``held`` have none; of both the
    positions say which is where. ``tries`` are numbers for all of them, each by the words for how:
    of each mapping the first ones are taken that the function has a finite derivative of."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    held: frozenset[int] = frozenset()
    tries: Sequence[Mapping[str, Sequence[Any]]] = field(default=())


def loss_of(call: Call, constants: Mapping[int, Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        given = []
        for i, (_, dtype) in enumerate(call.shapes):
            if i in constants:
                value = constants[i]
            elif i in call.held:
                value = params[f"held{i}"]
            else:
                value = batch[f"x{i}"]
                if "float" in dtype:
                    value = value + batch[f"c{i}"] * params[f"p{i}"]
            given.append(value)
        total = params["scale"] * 0.5
        for made in jax.tree.leaves(call.function(*given)):
            for part in _real(jnp.asarray(made)):
                total = total + jnp.mean(_weighed(part)) * params["scale"]
        return total

    return loss


def _real(made: Any) -> list[Any]:
    if jnp.iscomplexobj(made):
        return [jnp.real(made), jnp.imag(made)]
    return [made if "float" in str(made.dtype) else made.astype(jnp.float32)]


def _weighed(x: Any) -> Any:
    squares = jnp.square(x)
    return squares if x.ndim < 2 else squares * jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)


def operands(call: Call, values: Sequence[Any]) -> tuple[Numbers, Numbers, dict[int, Any]]:
    """Parameters, batch, and what is neither: whole numbers without samples."""
    rng = np.random.default_rng(7)
    params: dict[str, np.ndarray] = {"scale": np.ones((), "float32")}
    batch: dict[str, np.ndarray] = {}
    constants = {}
    for i, ((shape, dtype), value) in enumerate(zip(call.shapes, values, strict=True)):
        array = np.asarray(value, dtype)
        assert array.shape == shape
        if i in call.held and "float" not in dtype:
            constants[i] = array
        elif i in call.held:
            params[f"held{i}"] = array
        else:
            batch[f"x{i}"] = array
            if "float" in dtype:
                batch[f"c{i}"] = rng.normal(size=shape).astype(dtype)
                params[f"p{i}"] = np.zeros(shape[1:], dtype)
    return params, batch, constants


def tried(call: Call, stages: Sequence[tuple[Mesh, int]] = ()) -> Iterator[Outcome]:
    """Under each kind of numbers what capture gives, and under the last one what programs give."""
    why = "no values"
    for number, some in enumerate(call.tries, 1):
        for words, values in some.items():
            params, batch, constants = operands(call, values)
            loss = loss_of(call, constants)
            why = not_run(loss, params, batch)
            if not why:
                of_last = stages if number == len(call.tries) else ()
                yield from _tried(call.name, words, loss, params, batch, of_last)
                break
        else:
            yield Outcome(call.name, "", "", "not run", why)


def not_run(loss: Callable[..., Any], params: Numbers, batch: Numbers) -> str:
    """Why the model itself does not train, in words."""
    try:
        with jax.enable_x64(True):
            wide = [jax.tree.map(_wide, t) for t in (params, batch)]
            made = jax.jit(jax.value_and_grad(loss))(*wide)
    except Exception as error:  # whatever JAX raises of what it has no derivative of
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finite = all(np.isfinite(a).all() for a in jax.tree.leaves(made))
    return "" if finite else "no finite number"


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype("float64") if a.dtype == "float32" else a


def _tried(
    name: str,
    words: str,
    loss: Callable[..., Any],
    params: Numbers,
    batch: Numbers,
    stages: Sequence[tuple[Mesh, int]],
) -> Iterator[Outcome]:
    workload = Workload(
        loss=loss,
        init=lambda key: jax.tree.map(jnp.asarray, params),
        batch=lambda step=0: dict(batch),
        optimizer="sgd",
    )
    try:
        captured = capture_workload(workload)
        compare(captured, loss, params, batch)
    except Exception as error:  # what this is for
        yield Outcome(name, words, "captured", *_words(error))
        return
    yield Outcome(name, words, "captured", "right")
    for mesh, seed in stages:
        outcome = run(name, words, workload, captured, mesh, seed)
        yield Outcome(name, words, f"{mesh} {seed}", *outcome)


def _words(error: Exception) -> tuple[str, str]:
    if isinstance(error, UserError):
        return "no plan", f"{type(error).__name__}: {error}"
    return "WRONG", f"{error}" if isinstance(error, AssertionError) and str(error) else crash(error)


def run(
    name: str, words: str, workload: Workload, captured: Captured, mesh: Mesh, seed: int
) -> tuple[str, str]:
    try:
        made = drawn(f"{name} {words}", workload, captured, mesh, seed)
        errors, _ = made.exact()
    except Exception as error:  # what this is for
        return _words(error)
    return ("right", "") if errors.largest < TOLERANCE else ("WRONG", str(errors))


def drawn(name: str, workload: Workload, captured: Captured, mesh: Mesh, seed: int) -> Made:
    """The program of a captured workload under a stage that is drawn."""
    how: dict[str, Any] = {"framework": "jax", "optimizer": workload.optimizer, "style": "compiled"}
    lowered, plan = decided(captured, random_stage(captured, mesh, 1, seed, even=True), **how)
    files = emit(lowered, plan, captured)
    planned = PlanResult(plan, workload, cluster(4), captured, lowered.graph, lowered, ())
    return Made(name, {"name": name}, workload, captured, planned, files)
