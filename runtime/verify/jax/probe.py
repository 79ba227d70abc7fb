"""Recording what a JAX program computes, value by value and gradient by gradient.

The compiled program hands values to the host, device by device. The value goes on only when that
has been done, so on each device results arrive in an order in which they can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from autopar.runtime.jax import parallel
from autopar.runtime.shared.seen import Seen

Array = Any


class Recorder:
    """What has arrived. ``axes``: of the mesh, outermost first; ``devices`` on it."""

    def __init__(self, axes: Sequence[str], devices: int) -> None:
        self.axes = tuple(axes)
        self._values: list[list[Seen]] = [[] for _ in range(devices)]
        self._gradients: list[dict[str, list[np.ndarray]]] = [{} for _ in range(devices)]

    def value(self, name: str, sharding: str, device: int, x: np.ndarray) -> None:
        self._values[device].append(Seen(name, sharding, x))

    def gradient(self, name: str, device: int, x: np.ndarray) -> None:
        self._gradients[device].setdefault(name, []).append(x)

    def ranks(self, microbatches: int) -> list[list[Seen]]:
        """By device, the results as they came. Backward runs backwards in each microbatch."""
        for values, gradients in zip(self._values, self._gradients, strict=True):
            for name, arrived in gradients.items():
                own = [seen for seen in values if seen.name == name]
                calls = len(own) // microbatches
                if len(arrived) != len(own) or not calls:
                    continue
                for i, seen in enumerate(own):
                    micro, call = divmod(i, calls)
                    seen.gradient = arrived[micro * calls + calls - 1 - call]
        return self._values


_recorder: Recorder | None = None


def probe(name: str, x: Array, sharding: str = "R") -> Array:
    """``x`` itself, noted under ``name`` while `recording`; see `Seen`."""
    if _recorder is None:
        return x
    recorder = _recorder
    forward = partial(_after, recorder, partial(recorder.value, name, sharding))
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return forward(x)
    backward = partial(_after, recorder, partial(recorder.gradient, name))
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return function(x)


def _after(recorder: Recorder, note: Callable[[int, np.ndarray], None], x: Array) -> Array:
    """``x``, once ``note`` has it."""
    dtype = np.dtype(jnp.result_type(x))
    # 64 bits are narrowed in threads that have not enabled them: they travel as two halves
    sent = lax.bitcast_convert_type(x, np.uint32) if dtype.itemsize == 8 else x

    def arrived(device: Array, sent: Array) -> Array:
        array = np.array(sent)
        if dtype.itemsize == 8:
            array = array.view(dtype).reshape(array.shape[:-1])
        note(int(device), array)
        return np.int32(0)

    device = lax.axis_index(recorder.axes)
    done = io_callback(arrived, jax.ShapeDtypeStruct((), np.int32), device, sent)
    return lax.optimization_barrier((x, done))[0]


@contextmanager
def recording(axes: Sequence[str], devices: int, base: ModuleType = parallel) -> Iterator[Recorder]:
    """Inside, programs on ``base`` are traced with probes, and compute everything once."""
    global _recorder
    blocks: Any = getattr(base, "blocks", base)
    before = _recorder, getattr(blocks, "remembers", False)
    _recorder, blocks.remembers = Recorder(axes, devices), False
    try:
        yield _recorder
    finally:
        jax.effects_barrier()
        _recorder, blocks.remembers = before
