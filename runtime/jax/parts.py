"""What is asked of a `Part` of a program, the whole model or a stage, beside its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from autopar.runtime.jax.parallel import Array, Arrays, Part, State, placed
from autopar.runtime.jax.processes import owned

COUNTERS = ("step", "scale")
"""What a state has beside arrays of parameters."""


def state_of(part: Part, params: Arrays, constants: Arrays = MappingProxyType({})) -> State:
    """The state before the first step, from parameters that lie as it holds them."""
    slots = [name for name in part.state_specs if name not in ("params", "frozen")]

    def make() -> State:
        zeros = {k: jnp.zeros(p.shape, p.dtype) for k, p in params.items()}
        return {**dict.fromkeys(slots, zeros), **part.counters()}

    specs = placed(part.mesh, part.state_specs)
    made = jax.jit(make, out_shardings={n: specs[n] for n in slots})()
    frozen = owned(part.layout.gather_frozen(constants), specs["frozen"])
    return {"params": dict(params), **made, "frozen": frozen}


def shapes(part: Part, batch: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """What its calls take, as shapes that lie somewhere: of its state, and of a global batch."""
    every = part.layout.leaves
    state: State = {
        slot: {key: (every[key].shape, every[key].parameter.dtype) for key in specs}
        for slot, specs in part.state_specs.items()
        if slot not in COUNTERS
    }
    counters = jax.eval_shape(part.counters)
    state |= jax.tree.map(lambda x: (x.shape, x.dtype), counters)
    entries = {
        name: (part.cut_shape(name, batch[name]), batch[name].dtype) for name in part.batch_specs
    }
    return _lying(state, part.state_specs, part.mesh), _lying(entries, part.batch_specs, part.mesh)


def _lying(sizes: Any, specs: Any, mesh: Mesh) -> dict[str, Any]:
    """(shape, dtype) pairs as shapes that lie by ``specs`` on ``mesh``."""
    made: dict[str, Any] = jax.tree.map(
        lambda sharding, size: jax.ShapeDtypeStruct(*size, sharding=sharding),
        placed(mesh, {name: specs[name] for name in sizes}),
        sizes,
    )
    return made


def drawing(part: Part, draw: Callable[[Arrays], Arrays], names: Iterable[str]) -> Any:
    """What takes a batch's random keys to the entries ``names`` of `cut`, that ``draw`` gives
    whole: each device draws what it reads."""
    specs = {name: part.batch_specs[name] for name in names if name in part.batch_specs}

    def run(keys: Arrays) -> dict[str, Array]:
        made = draw(keys)
        return {name: part.apart(name, made[name]) for name in specs}

    return part.compiled(run, (PartitionSpec(),), specs)
