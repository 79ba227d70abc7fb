"""How calls of compiled functions are timed: one process, all of the cluster's devices at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from autopar.nouns.axes import REPLICATE
from autopar.runtime.jax.parallel.placing import make_mesh
from autopar.runtime.profile.figures import ENOUGH_S, FEWEST, MOST, Known

AXIS = REPLICATE
"""Of all devices, each of which computes the same."""
EACH: Any = PartitionSpec(AXIS)


class Bench:
    """Times functions on ``devices`` devices at once, by the slowest of them."""

    def __init__(
        self, known: Known, devices: int, enough_s: float = ENOUGH_S, fewest: int = FEWEST
    ) -> None:
        """``known`` is not measured again; repeats take ``enough_s`` where they are short, and are
        more than ``fewest``."""
        self.known, self.enough_s, self.fewest = known, enough_s, fewest
        self.devices = devices
        self.mesh: Mesh = make_mesh(**{AXIS: devices})
        nothing = self.each(np.zeros((1,), np.float32))
        self.start_s = min(self.times((self.on_each(lambda x: x + 1), (nothing,)))[0])

    def wants(self, subject: str, key: str, size_bytes: float, flops: float) -> bool:
        return (subject, key, float(size_bytes), float(flops)) not in self.known

    def each(self, x: NDArray[Any]) -> Any:
        """``x`` on every device, one behind the other along the first dim: by numpy, for JAX would
        compile what makes it."""
        whole = np.concatenate([x] * self.devices)
        return jax.device_put(whole, NamedSharding(self.mesh, EACH))

    def on_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of what each device has, compiled."""
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=EACH, out_specs=EACH, check_vma=False
        )
        compiled: Callable[..., Any] = jax.jit(mapped)
        return compiled

    def times(self, *calls: tuple[Callable[..., Any], tuple[Any, ...]]) -> list[list[float]]:
        """Seconds of each of the calls (function, operands), run in turns; one figure a repeat.
        The first runs, which compile, are left out."""
        for function, operands in calls:
            jax.block_until_ready(function(*operands))
        rows: list[list[float]] = []
        began = time.perf_counter()
        while len(rows) < MOST:
            if len(rows) > self.fewest and time.perf_counter() - began > self.enough_s:
                break
            row = []
            for function, operands in calls:
                before = time.perf_counter()
                jax.block_until_ready(function(*operands))
                row.append(time.perf_counter() - before)
            rows.append(row)
        return [list(column) for column in zip(*rows, strict=True)]
