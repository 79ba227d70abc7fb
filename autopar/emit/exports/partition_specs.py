"""A JAX module of `PartitionSpec`s by parameter name, for one's own ``jit``.

It names the mesh, how parameters, optimizer state and batch lie on it, and constraints for the
values that the plan shards. Names are those of the pytree, joined by dots.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.emit.exports.setup import Setup, StoredTensor
from autopar.emit.exports.tensor_styles import wildcard
from autopar.emit.exports.text import Export, Limit, header, no_degrees, not_carried, refuse_beyond
from autopar.lowering.state import even_cut
from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR
from autopar.nouns.mesh import Mesh

NAME = "partition-specs"
USE = """\
#
#     m = mesh()
#     where = jax.tree.map(lambda spec: NamedSharding(m, spec), parameter_specs(params))
#     step = jax.jit(step, in_shardings=(where, ...), out_shardings=(where, ...))
#     with jax.set_mesh(m):  # where the step calls `constrain`
#         params = step(jax.device_put(params, where), ...)
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
"""
FUNCTIONS = '''

def mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over the devices of the job, the innermost axis fastest."""
    places = np.asarray(jax.devices() if devices is None else devices)
    return Mesh(places.reshape(tuple(MESH.values())), tuple(MESH))


def parameter_specs(params: Any) -> Any:
    """A PartitionSpec for every leaf of ``params``; KeyError names one that is not the plan's."""
    return _specs(params, PARAMETERS)


def state_specs(params: Any) -> Any:
    """The same for what the optimizer keeps of every parameter."""
    return _specs(params, STATE)


def constrain(name: str, value: jax.Array) -> jax.Array:
    """``value`` as the plan has it between its producer and its readers, under `jax.set_mesh`."""
    return jax.lax.with_sharding_constraint(value, ACTIVATIONS[name])


def _specs(params: Any, table: dict[str, P]) -> Any:
    def one(path: Any, leaf: Any) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        numbered = re.sub(r"(?<=\\.)\\d+(?=\\.|$)", "*", name)
        if numbered in table:
            return table[numbered]
        # Layers that a scan stacks have their number as the first dim, and not in the name.
        for pattern, spec in table.items():
            if pattern.replace(".*", "") == numbered:
                return P(*(None,) * pattern.count(".*"), *spec)
        raise KeyError(f"{name} is no parameter of the plan; plan the model again")

    return jax.tree_util.tree_map_with_path(one, params)
'''


def export(setup: Setup) -> Export:
    """``autopar_specs.py``. Raises `Refused`."""
    x = setup.layout
    refuse_beyond(NAME, _limits(setup))
    left_out = not_carried(
        setup,
        f"{x.microbatches} microbatches: accumulate gradients over a scan of your own"
        if x.microbatches > 1
        else "",
        f"recompute {x.recompute}: wrap the layer in jax.checkpoint"
        if x.recompute.runs_again
        else "",
        "ops' own choices: XLA propagates from these specs and constraints",
        per_op=False,
        selects_ops=True,
    )
    sizes = {REPLICATE: x.dp_replicate, SHARD: x.dp_shard, TENSOR: x.tp}
    stored = _once(setup.parameters)
    parts = [
        header(setup, "one's own jax.jit", left_out) + USE,
        f"MESH = {_dict({name: str(size) for name, size in sizes.items()})}",
        f"PARAMETERS = {_dict({n: _spec(p, setup, x.zero == 3) for n, p in stored.items()})}",
        f"STATE = {_dict({n: _spec(p, setup, x.zero > 0) for n, p in stored.items()})}",
        f"BATCH = {_dict(_batch(setup))}",
        f"ACTIVATIONS = {_dict(_activations(setup))}",
    ]
    text = "\n".join(parts) + "\n" + FUNCTIONS
    start = "import autopar_specs in your training script"
    return Export({"autopar_specs.py": text}, left_out, start)


def _once(parameters: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Parameters of repeated layers once, as ``blocks.*.up.weight``."""
    first_of: dict[str, StoredTensor] = {}
    for p in parameters:
        first_of.setdefault(wildcard(p.name), p)
    return first_of


def _spec(p: StoredTensor, setup: Setup, sharded: bool) -> str:
    """``P('dp_shard', 'tp')``; ``sharded``: over dp_shard too, where our programs cut."""
    axes: list[list[str]] = [[] for _ in p.shape]
    mesh = Mesh((TENSOR,), (setup.layout.tp,))
    for axis, placement in p.sharding.placements:
        if placement.kind == "S" and mesh.size(axis) > 1:
            axes[placement.dim].append(axis)
    if sharded and setup.layout.dp_shard > 1:
        cut = even_cut(p.sharding.local_shape(p.shape, mesh), setup.layout.dp_shard)
        if cut is not None:
            axes[cut].append(SHARD)
    return _text(axes)


def _data(setup: Setup) -> list[str]:
    return [name for name in (REPLICATE, SHARD) if getattr(setup.layout, name) > 1]


def _batch(setup: Setup) -> dict[str, str]:
    specs = {}
    for name, (rank, dim) in setup.batch_dims.items():
        axes: list[list[str]] = [[] for _ in range(rank)]
        if dim is not None:
            axes[dim] = _data(setup)
        specs[name] = _text(axes)
    return specs


def _activations(setup: Setup) -> dict[str, str]:
    """Values whose first dim is the batch; a partial sum cannot be told to ``jit``."""
    specs = {}
    for value in setup.activations:
        if not value.shape or value.shape[0] != setup.layout.global_batch:
            continue
        placements = value.sharding.placements
        if any(p.kind == "P" for _, p in placements):
            continue
        axes: list[list[str]] = [[] for _ in value.shape]
        axes[0] = _data(setup)
        for axis, placement in placements:
            if placement.kind == "S":
                axes[placement.dim] = [*axes[placement.dim], axis]
        specs[value.name] = _text(axes)
    return specs


def _text(axes: list[list[str]]) -> str:
    """Trailing dims that nothing splits are left out."""
    while axes and not axes[-1]:
        axes = axes[:-1]
    words = [repr(tuple(a)) if len(a) > 1 else repr(a[0]) if a else "None" for a in axes]
    return f"P({', '.join(words)})".replace("'", '"')


def _dict(rows: dict[str, str]) -> str:
    return "{\n" + "".join(f'    "{name}": {text},\n' for name, text in rows.items()) + "}"


def _limits(setup: Setup) -> tuple[Limit, ...]:
    absent = dict.fromkeys(
        (PIPELINE, CONTEXT, EXPERT),
        "PartitionSpecs come from a plan's program, and no program has that axis yet",
    )
    return (
        Limit(
            setup.framework != "jax",
            f"a model of {setup.framework or 'no framework'}",
            "PartitionSpecs go by the names of a JAX model's parameters",
            "Plan the JAX model (`autopar plan`) and export that plan",
        ),
        *no_degrees(setup, absent, "maxtext or axlearn"),
    )
