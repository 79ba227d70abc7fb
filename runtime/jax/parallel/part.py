"""What a program's devices hold of a model, or of one of its stages, and how functions run there.

Everything runs on the pieces of one device inside one `jax.shard_map`, so the collectives of a step
are those that are written in ``model.py``, in ``train.py`` and in what they call, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.runtime.jax.parallel.blocks import Stack
from autopar.runtime.jax.parallel.layout import Layout, Leaf
from autopar.runtime.jax.parallel.placing import placed, put
from autopar.runtime.jax.parallel.tables import SEQUENCE_AXES, Array, Arrays, State
from autopar.runtime.jax.parallel.zigzag import zigzag_places

Held = tuple[Mesh, dict[str, Any]]
"""The mesh, and a tree of partition specs for the state."""

COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    # XLA drops barriers on CPUs before it merges equal ops, so a layer outside of a loop would keep
    # for its backward pass what it is to gather or compute again; a barrier costs nothing there
    "cpu": {"xla_disable_hlo_passes": "cse_barrier_expander"},
    # what the plan's time supposes: collectives run beside what does not wait for them
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
})  # fmt: skip
"""By platform. A TPU's compiler does so by itself."""


class Part:
    """A model, or a stage of it, on the devices of ``mesh``: ``layout`` says what of it is stored,
    ``state_specs`` how that lies there.
    """

    mesh: Mesh
    state_specs: dict[str, Any]
    batch_specs: dict[str, Any]

    def __init__(
        self, program: ModuleType, workload: Any, train: ModuleType, layout: Layout
    ) -> None:
        """``program``: model.py; ``train``: train.py; ``workload``: has the optimizer's numbers."""
        self.program = program
        self.workload = workload
        self.layout = layout
        self.train: Any = train
        self.mesh, specs = self.train.hold(layout)
        self.state_specs = {"frozen": {}, **specs}
        self.batch_specs = dict(program.BATCH)

    def jitted(self, function: Any, given: Any, made: Any, donate: tuple[int, ...] = ()) -> Any:
        """``function`` of the pieces of one device, as `compiled` makes it."""
        return self.compiled(self.on_pieces(function, given, made), given, made, donate)

    def on_pieces(self, function: Any, given: Any, made: Any) -> Any:
        """``function`` of the pieces of one device as one of whole arrays."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False
        )

    def compiled(self, function: Any, given: Any, made: Any, donate: tuple[int, ...] = ()) -> Any:
        """``function`` jitted; ``given`` and ``made`` are the partition specs of its arguments and
        results."""
        return jax.jit(
            function,
            in_shardings=placed(self.mesh, given),
            out_shardings=placed(self.mesh, made),
            donate_argnums=donate,
            compiler_options=COMPILER_OPTIONS.get(self.mesh.devices.flat[0].platform),
        )

    def initial(
        self, parameters: Callable[[Layout], Arrays], constants: Arrays = MappingProxyType({})
    ) -> State:
        """The state before the first step, every piece made on the device that holds it.

        ``parameters`` gives the arrays of `Layout.gather_names`; ``constants`` are by full name.
        """

        def make() -> State:
            params = dict(parameters(self.layout))
            zeros = {k: jnp.zeros_like(p) for k, p in params.items()}
            slots = {slot: zeros for slot in self.slots}
            return {"params": params, **slots, **self.counters()}

        specs = placed(self.mesh, self.state_specs)
        frozen = self.on_devices(self.layout.gather_frozen(constants), specs.pop("frozen"))
        return {**jax.jit(make, out_shardings=specs)(), "frozen": frozen}

    def on_devices(self, arrays: Arrays, shardings: Any) -> dict[str, Array]:
        """``arrays`` as a state holds them."""
        made: dict[str, Array] = put(arrays, shardings)
        return made

    @property
    def reduces_in(self) -> str | None:
        """The dtype in which axes that share state sum gradients; None: as they are stored."""
        return self.layout.settings.reduce_dtype

    @property
    def scatters(self) -> Mapping[str, int]:
        """Axes over which a reduce-scatter is two."""
        return self.layout.settings.scatters

    @property
    def slots(self) -> tuple[str, ...]:
        """What the optimizer keeps of every parameter."""
        others = ("params", "frozen", "step", "scale")
        return tuple(name for name in self.state_specs if name not in others)

    def counters(self) -> State:
        """What a state has beside arrays of parameters, before the first step."""
        more: State = self.train.counters() if hasattr(self.train, "counters") else {}
        return {"step": jnp.zeros((), jnp.int32), **more}

    def cut(
        self, batch: Mapping[str, Any], drawn: Arrays = MappingProxyType({})
    ) -> dict[str, Array]:
        """A global batch with its microbatches apart, each entry where its readers are; those that
        are ``drawn`` are so already, see `drawing`."""
        pieces = {}
        for name, spec in self.batch_specs.items():
            if name in drawn:
                pieces[name] = drawn[name]
                continue
            several = jax.process_count() > 1
            array = np.asarray(batch[name]) if several else jnp.asarray(batch[name])
            pieces[name] = put(self.apart(name, array), NamedSharding(self.mesh, spec))
        return pieces

    def apart(self, name: str, array: Any) -> Any:
        """An entry of the batch with its microbatches along a first dim, and with the tokens of
        each device's sequences side by side."""
        shape = self.cut_shape(name, array)
        whole = len(shape) > array.ndim and shape[1:] == array.shape
        made = jnp.broadcast_to(array, shape) if whole else array.reshape(shape)
        if self.layout.settings.order != "zigzag":
            return made
        for dim, axes in enumerate(self.program.BATCH[name]):
            named = (axes,) if isinstance(axes, str) else axes or ()
            along = [self.layout.mesh[a] for a in named if a in SEQUENCE_AXES]
            if along:
                ways = math.prod(along)
                made = made.take(zigzag_places(made.shape[dim], ways), dim)
        return made

    def cut_shape(self, name: str, array: Any) -> tuple[int, ...]:
        """The shape that it has so."""
        count = self.layout.settings.microbatches
        if name in self.layout.settings.whole_inputs or not array.shape:
            return (count, *array.shape)
        return (count, array.shape[0] // count, *array.shape[1:])

    def paired(self, own: Arrays, whole: Arrays) -> dict[str, Any]:
        """``own``, the arrays that gradients are of; those that are pieces of parameters that the
        device holds ``whole`` with these, which are read."""
        leaves = self.layout.leaves
        return {
            k: (p, whole[k]) if k in whole and leaves[k].cut is not None else p
            for k, p in own.items()
        }

    def stack(self, block: str, arrays: Mapping[str, Any]) -> Stack:
        """The layers of ``block``, of arrays by key."""
        here = {leaf.name: leaf for leaf in self.layout.leaves_of(block)}
        return Stack(
            {name: arrays[leaf.key] for name, leaf in here.items()},
            partial(self.prepared, here),
            recompute=self.layout.settings.recompute,
        )

    def prepared(self, leaves: Mapping[str, Leaf], arrays: Mapping[str, Any]) -> dict[str, Array]:
        made: dict[str, Array] = self.train.prepared(self, leaves, arrays)
        return made

    def cast(self, leaves: Mapping[str, Leaf], arrays: Arrays) -> dict[str, Array]:
        """Parameters in the dtype of compute."""
        dtypes = self.dtypes(leaves, arrays)
        return {name: x.astype(dtypes[name]) for name, x in arrays.items()}

    def dtypes(self, leaves: Mapping[str, Leaf], arrays: Arrays) -> dict[str, Any]:
        """In which numbers parameters are computed with."""
        return {name: self.dtype_of(x.dtype, leaves[name]) for name, x in arrays.items()}

    def dtype_of(self, dtype: Any, leaf: Leaf | None = None) -> Any:
        """In which numbers of ``dtype`` are computed with."""
        precision = self.layout.settings.precision
        cast = precision != "float32" and dtype == jnp.float32
        cast &= leaf is None or not leaf.parameter.buffer
        return jnp.dtype(precision) if cast else dtype

    def computing(self, batch: Arrays) -> dict[str, Array]:
        """In the dtype of compute, but for counts, which half a precision would round."""
        counts = self.layout.settings.counts
        dtypes = {n: a.dtype if n in counts else self.dtype_of(a.dtype) for n, a in batch.items()}
        return {n: a if a.dtype == dtypes[n] else a.astype(dtypes[n]) for n, a in batch.items()}
