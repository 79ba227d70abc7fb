"""What training starts from: the workload's file, and what lies beside the program."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import export

from autopar.runtime.jax.parallel.layout import Layout, by_name, paths_of
from autopar.runtime.jax.parallel.placing import is_key
from autopar.runtime.jax.parallel.tables import Array, Arrays

_PROGRAM = ("model", "parallel", "train")


def read_workload(folder: Path, target: str) -> Any:
    """What ``file.py`` in ``folder``, or ``file.py:name``, says: a loss with its ``init(key)``,
    ``batch(step)`` and the optimizer's numbers. Its imports see the files beside it, not these."""
    name, _, attribute = target.partition(":")
    file = folder / name
    if not file.is_file():
        raise SystemExit(
            f"{file} is not there: this was planned in a script, which has the parameters and the "
            "batches. Train from there with `Step` of parallel.py, as `main` of train.py does"
        )
    ours = {name: sys.modules.pop(name) for name in _PROGRAM if name in sys.modules}
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.update(ours)
    if attribute:
        return getattr(module, attribute)
    return next(value for value in vars(module).values() if callable(getattr(value, "loss", None)))


def initial_parameters(
    workload: Any, stacks: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> Callable[[Layout], Arrays]:
    """What makes the parameters of a layout, as `initial` takes it. ``stacks``: see model.py."""

    def make(layout: Layout) -> Arrays:
        leaves = paths_of(workload.init(jax.random.key(workload.seed)))
        names = {
            path: [f"{stacks[path][0]}.{i}.{stacks[path][1]}" for i in range(leaf.shape[0])]
            for path, leaf in leaves
            if path in stacks
        }
        return layout.gather_names(by_name(leaves, names))

    return make


def read_constants(file: Path, layout: Layout) -> dict[str, Array]:
    """Arrays that the loss closes over, by name; of bfloat16 there are the bits, as integers."""
    dtypes = {n: leaf.parameter.dtype for leaf in layout.frozen.values() for n in leaf.names}
    with np.load(file) as stored:
        return {name: stored[name].view(np.dtype(dtype)) for name, dtype in dtypes.items()}


def read_draws(file: Path) -> Callable[[Arrays], Arrays]:
    """What adds the random numbers of a step to its batch, and numbers of the whole batch."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise SystemExit(f"{file} is as jax.export writes it, which takes: pip install flatbuffers")
    drawn = export.deserialize(bytearray(file.read_bytes()))
    (given,), _ = jax.tree.unflatten(drawn.in_tree, drawn.in_avals)

    def draw(batch: Arrays) -> Arrays:
        bits = {n: jax.random.key_data(batch[n]) if is_key(batch[n]) else batch[n] for n in given}
        return {**batch, **drawn.call(bits)}

    return draw


def batch_of(workload: Any, number: int) -> Arrays:
    """The global batch of a step."""
    taken = inspect.signature(workload.batch).parameters.values()
    numbered = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken)
    made: Arrays = workload.batch(number) if numbered else workload.batch()
    return made


def see_devices(mesh: Mapping[str, int]) -> None:
    """Where jax sees CPUs alone, it sees as many as ``mesh`` has; ends where there are too few.
    Called before it sees any."""
    count = math.prod(mesh.values())
    alone = not jax.distributed.is_initialized()
    if alone and "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise SystemExit(f"this is for {count} devices, jax sees {jax.device_count()}")
