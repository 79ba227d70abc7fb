"""One training step of an emitted JAX program: gradients, their reductions, the update.

Everything runs on the pieces of one device inside one `jax.shard_map`, so the collectives of a step
are those that are written in the program (``model.py``, ``train.py``), here and nowhere else. What
is reduced when is the table of `autopar.lowering.state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.emit.jax.train import How, train_text
from autopar.nouns import mesh as meshes
from autopar.nouns.workload import Workload
from autopar.runtime.jax import loss_scale
from autopar.runtime.jax.gradients import own_part
from autopar.runtime.jax.layout import Layout, Leaf
from autopar.runtime.jax.optimizer import SLOTS
from autopar.runtime.jax.outputs import OutputKinds, Outputs
from autopar.runtime.jax.processes import owned, put
from autopar.runtime.jax.program import Stack
from autopar.runtime.jax.units import gathered, scattered
from autopar.runtime.shared.program_module import run_program

Array = Any
Arrays = Mapping[str, Array]
State = dict[str, Any]
"""``params`` and one dict of arrays for each slot of the optimizer, and the number of ``step``s; in
float16 the loss's ``scale``."""

# XLA drops barriers on CPUs before it merges equal ops, so a layer outside of a loop would keep for
# its backward pass what it is to gather or compute again; a barrier itself costs nothing there
_COMPILER_OPTIONS = {"cpu": {"xla_disable_hlo_passes": "cse_barrier_expander"}}


class Step:
    """The jitted functions of a program.

    ``step(state, batch)`` gives the next state, the loss, the norm of the gradient (0 where nothing
    is clipped), and a tuple of what the loss function returns beside, if anything, as
    `OutputKinds.reduced` leaves it. ``watched(state, batch, given)`` gives the reduced gradients in
    the norm's place, leaves the old state alone and steps on the gradients that are ``given``. A
    batch has the microbatches as its first dim: [m, samples, ...]; see `Step.cut`.

    ``gradients(held, batch)`` gives loss, reduced gradients and that tuple, ``evaluate(held,
    batch)`` loss and tuple alone, and ``update(state, gradients)`` the next state and the norm;
    they are not jitted, and the first two take `held` of a state.
    """

    def __init__(
        self, program: ModuleType, workload: Workload, train: ModuleType | None = None
    ) -> None:
        """``program``: model.py; ``train``: the train.py beside it, by default the one that
        `autopar.emit.jax.train` gives."""
        self.program = program
        self.workload = workload
        self.layout = Layout.of(program)
        self._train: Any = train or _train_of(self.layout, workload, hasattr(program, "OUTPUTS"))
        self.mesh: Mesh
        self.mesh, specs = self._train.hold(self.layout)
        self.scales = self.layout.settings.precision == "float16"
        scale = {"scale": loss_scale.SPECS} if self.scales else {}
        self.state_specs: dict[str, Any] = {"frozen": {}, **specs, **scale}
        self.outputs = OutputKinds(getattr(program, "OUTPUTS", ()), self.layout.data_axes)
        more = self.outputs.specs
        reduced = self.layout.specs(cut=True)
        plain = PartitionSpec()
        batch = dict(program.BATCH)
        given, state = (self.state_specs, batch), self.state_specs
        self.held_specs = held(state)
        self.reduced_specs = reduced
        self.batch_specs = batch
        self.step = self._jit(
            self._step, given, (state, plain, plain, *((more,) if more else ())), (0,)
        )
        self.watched = self._jit(self._watched, (*given, reduced), (state, plain, reduced))
        known = (self.held_specs, batch)
        self.gradients = self._on_pieces(self._gradients, known, (plain, reduced, more))
        self.evaluate = self._on_pieces(self._evaluate, known, (plain, more))
        self.update = self._on_pieces(self._update, (state, reduced), (state, plain))

    def _jit(self, function: Any, given: Any, made: Any, donate: tuple[int, ...] = ()) -> Any:
        return self.compiled(self._on_pieces(function, given, made), given, made, donate)

    def _on_pieces(self, function: Any, given: Any, made: Any) -> Any:
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
            compiler_options=_COMPILER_OPTIONS.get(self.mesh.devices.flat[0].platform),
        )

    def state_of(self, params: Arrays, constants: Arrays = MappingProxyType({})) -> State:
        """The state before the first step, from parameters that lie as it holds them."""
        slots = {n: s for n, s in self.state_specs.items() if n not in ("params", "frozen")}

        def make() -> State:
            zeros = {k: jnp.zeros(p.shape, p.dtype) for k, p in params.items()}
            return {**dict.fromkeys(slots, zeros), **self.counters()}

        specs = placed(self.mesh, self.state_specs)
        frozen = owned(self.layout.gather_frozen(constants), specs["frozen"])
        made = jax.jit(make, out_shardings={n: specs[n] for n in slots})()
        return {"params": dict(params), **made, "frozen": frozen}

    def initial(
        self, parameters: Callable[[], Arrays], constants: Arrays = MappingProxyType({})
    ) -> State:
        """The state before the first step, every piece made on the device that holds it.

        ``parameters`` gives the arrays of `Layout.gather_names`; ``constants`` are by full name.
        """

        def make() -> State:
            params = dict(parameters())
            zeros = {k: jnp.zeros_like(p) for k, p in params.items()}
            slots = {slot: zeros for slot in SLOTS.get(self.workload.optimizer, ())}
            return {"params": params, **slots, **self.counters()}

        specs = placed(self.mesh, self.state_specs)
        frozen = owned(self.layout.gather_frozen(constants), specs.pop("frozen"))
        return {**jax.jit(make, out_shardings=specs)(), "frozen": frozen}

    def counters(self) -> State:
        """What a state has beside arrays of parameters, before the first step."""
        scale = {"scale": loss_scale.initial()} if self.scales else {}
        return {"step": jnp.zeros((), jnp.int32), **scale}

    def cut(
        self, batch: Mapping[str, Any], drawn: Arrays = MappingProxyType({})
    ) -> dict[str, Array]:
        """A global batch with its microbatches apart, each entry where its readers are; those that
        are ``drawn`` are so already, see `drawing`."""
        pieces = {}
        for name, spec in self.program.BATCH.items():
            if name in drawn:
                pieces[name] = drawn[name]
                continue
            several = jax.process_count() > 1
            array = np.asarray(batch[name]) if several else jnp.asarray(batch[name])
            pieces[name] = put(self._apart(name, array), NamedSharding(self.mesh, spec))
        return pieces

    def drawing(self, draw: Callable[[Arrays], Arrays], names: Iterable[str]) -> Any:
        """What takes a batch's random keys to the entries ``names`` of `cut`, that ``draw`` gives
        whole: each device draws what it reads."""
        batch = self.program.BATCH
        specs = {name: batch[name] for name in names if name in batch}

        def run(keys: Arrays) -> dict[str, Array]:
            made = draw(keys)
            return {name: self._apart(name, made[name]) for name in specs}

        return self.compiled(run, (PartitionSpec(),), specs)

    def _apart(self, name: str, array: Any) -> Any:
        shape = self._cut_shape(name, array)
        whole = len(shape) > array.ndim and shape[1:] == array.shape
        return jnp.broadcast_to(array, shape) if whole else array.reshape(shape)

    def shapes(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `step` and `watched` take, as shapes: of the state, and of a global batch."""
        params = {
            key: jax.ShapeDtypeStruct(leaf.shape, leaf.parameter.dtype)
            for key, leaf in self.layout.trained.items()
        }
        state: dict[str, Any] = dict.fromkeys(self.state_specs, params)
        state["frozen"] = {
            key: jax.ShapeDtypeStruct(leaf.shape, leaf.parameter.dtype)
            for key, leaf in self.layout.frozen.items()
        }
        state |= jax.eval_shape(self.counters)
        cut = {
            name: jax.ShapeDtypeStruct(self._cut_shape(name, batch[name]), batch[name].dtype)
            for name in self.program.BATCH
        }
        return state, cut

    def _cut_shape(self, name: str, array: Any) -> tuple[int, ...]:
        count = self.layout.settings.microbatches
        if name in self.layout.settings.whole_inputs or not array.shape:
            return (count, *array.shape)
        return (count, array.shape[0] // count, *array.shape[1:])

    # -- on the pieces of one device -------------------------------------------------------------

    def _step(self, state: State, batch: Arrays) -> tuple[Any, ...]:
        loss, gradients, outputs = self._gradients(state, batch)
        state, norm = self._update(state, gradients)
        return state, loss, norm.astype(loss.dtype), *((outputs,) if outputs else ())

    def _watched(self, state: State, batch: Arrays, given: Arrays) -> tuple[State, Array, Arrays]:
        loss, gradients, _ = self._gradients(state, batch)
        return self._train.update(self, state, given)[0], loss, gradients

    def _gradients(self, state: State, batch: Arrays) -> tuple[Array, Arrays, Outputs]:
        loss, gradients, *rest = self._train.backward(self, state, batch)
        return loss, gradients, self.outputs.reduced(rest[0] if rest else ())

    def _update(self, state: State, gradients: Arrays) -> tuple[State, Array]:
        after, norm = self._train.update(self, state, gradients)
        if not self.scales:
            return after, norm
        axes = tuple(axis for axis, size in self.layout.mesh.items() if size > 1)
        overflow = loss_scale.overflowed(gradients, axes)
        state = loss_scale.settled(overflow, state, after)
        state["scale"] = loss_scale.stepped(after["scale"], overflow)
        return state, loss_scale.norm_of(overflow, norm, self.workload.clip_norm)

    def _evaluate(self, state: State, batch: Arrays) -> tuple[Array, Outputs]:
        def add(so_far: Array, microbatch: Arrays) -> tuple[Array, Outputs]:
            share, outputs = self._share(state, state["params"], microbatch)
            return so_far + share.astype(so_far.dtype), outputs

        first = {name: entry[0] for name, entry in batch.items()}
        share, _ = jax.eval_shape(lambda: self._share(state, state["params"], first))
        zero = jnp.zeros((), jnp.promote_types(share.dtype, jnp.float32))
        loss, outputs = lax.scan(add, zero, batch)
        loss = lax.psum(loss, self.layout.data_axes) if self.layout.data_axes else loss
        return loss, self.outputs.reduced(outputs)

    def zeros(self, state: State, batch: Arrays) -> tuple[Array, dict[str, Array]]:
        """Loss and gradients that `value_and_grad` gives of a microbatch, all zero."""
        first = {name: entry[0] for name, entry in batch.items()}
        share, _ = jax.eval_shape(lambda: self._share(state, state["params"], first))
        shapes = jax.eval_shape(self._own, state["params"])
        loss = jnp.zeros((), jnp.promote_types(share.dtype, jnp.float32))
        return loss, {k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items()}

    def _own(self, params: Arrays) -> Arrays:
        """What gradients are of: with ZeRO 2 the device's piece of every parameter."""
        split = self.layout.settings.split
        if not split.gradients or split.parameters:
            return params
        return {k: own_part(self.layout, k, p) for k, p in params.items()}

    def value_and_grad(self, state: State, batch: Arrays) -> tuple[Any, ...]:
        """Loss share and gradients of one microbatch, and a tuple of what `loss` returns beside, if
        anything; with ZeRO 2 every layer's are cut at once, with ZeRO 3 parameters are gathered
        layer by layer."""
        params, frozen = state["params"], state["frozen"]
        split = self.layout.settings.split
        if split.parameters:
            # else XLA gathers once before the loop over microbatches, and keeps what it gathered
            params, frozen, batch = lax.optimization_barrier((params, frozen, batch))
        own = self._own(params)
        whole = params if split.gradients and not split.parameters else {}
        scale = state["scale"]["scale"] if self.scales else None

        def share(own: Arrays) -> tuple[Array, tuple[Array, Outputs]]:
            loss, outputs = self._share({"frozen": frozen}, own, batch, whole)
            if scale is None:
                return loss, (loss, outputs)
            return loss.astype(scale.dtype) * scale, (loss, outputs)

        (_, (loss, outputs)), gradients = jax.value_and_grad(share, has_aux=True)(own)
        if scale is not None:
            gradients = {k: (g / scale).astype(g.dtype) for k, g in gradients.items()}
        loss = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
        return (loss, dict(gradients), outputs) if self.outputs else (loss, dict(gradients))

    def _share(
        self, state: State, own: Arrays, batch: Arrays, whole: Arrays = MappingProxyType({})
    ) -> tuple[Array, Outputs]:
        """This device's share of a microbatch's loss, and what is beside it; ``own``, ``whole``:
        see `_given`."""
        given = self._given({**own, **state["frozen"]}, whole)
        made = self.program.loss(given, **self.computing(batch))
        return (made[0], tuple(made[1:])) if self.outputs else (made, ())

    def _given(self, own: Arrays, whole: Arrays) -> dict[str, Any]:
        """What the program's ``loss`` reads: parameters by name, and a `Stack` for each block.

        ``own`` are the arrays that gradients are of; where those are pieces of parameters that the
        device holds ``whole``, these are read.
        """
        leaves = self.layout.leaves
        pairs = {
            k: (p, whole[k]) if k in whole and leaves[k].cut is not None else p
            for k, p in own.items()
        }
        root = {k: leaf for k, leaf in leaves.items() if not leaf.layers}
        parameters: dict[str, Any] = self._prepared(root, {k: pairs[k] for k in root})
        for block in self.program.BLOCKS:
            here = {leaf.name: leaf for k, leaf in leaves.items() if k.startswith(f"{block}/")}
            parameters[block] = Stack(
                {name: pairs[leaf.key] for name, leaf in here.items()},
                partial(self._prepared, here),
                recompute=self.layout.settings.recompute,
            )
        return parameters

    def _prepared(self, leaves: Mapping[str, Leaf], arrays: Mapping[str, Any]) -> dict[str, Array]:
        """A unit's parameters whole over ``dp_shard``, in the dtype of compute."""
        if self.layout.settings.split.parameters:
            dtypes = {name: self.dtype_of(a.dtype, leaves[name]) for name, a in arrays.items()}
            cuts = {name: leaf.cut for name, leaf in leaves.items()}
            frozen = [name for name, leaf in leaves.items() if leaf.parameter.frozen]
            return gathered(arrays, cuts, dtypes, frozen)
        prepared = {}
        for name, given in arrays.items():
            piece, whole = given if isinstance(given, tuple) else (None, given)
            x = whole if piece is None else scattered(whole, piece, leaves[name].cut or 0)
            prepared[name] = x.astype(self.dtype_of(whole.dtype, leaves[name]))
        return prepared

    def dtype_of(self, dtype: Any, leaf: Leaf | None = None) -> Any:
        """In which numbers of ``dtype`` are computed with."""
        precision = self.layout.settings.precision
        cast = precision != "float32" and dtype == jnp.float32
        cast &= leaf is None or not leaf.parameter.buffer
        return jnp.dtype(precision) if cast else dtype

    def computing(self, batch: Arrays) -> dict[str, Array]:
        """In the dtype of compute."""
        dtypes = {n: self.dtype_of(a.dtype) for n, a in batch.items()}
        return {n: a if a.dtype == dtypes[n] else a.astype(dtypes[n]) for n, a in batch.items()}


def held(state: State) -> State:
    """What a forward and a backward pass read of a state, or of its specs."""
    return {n: state[n] for n in ("params", "frozen", "step", "scale") if n in state}


def make_mesh(**sizes: int) -> Mesh:
    """The mesh of all devices, axes outermost first.

    `jax.make_mesh` refuses axes that share a dim of a TPU's torus, and several slices of TPUs: the
    outermost axes are to go across these.
    """
    shape, auto = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: math.prod(shape)]
    is_tpu = devices[0].platform == "tpu"
    slices = {getattr(device, "slice_index", 0) if is_tpu else 0 for device in devices}
    across, left = [], len(slices)
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    if max(across, default=1) > 1:
        inside = [size // ways for size, ways in zip(shape, across, strict=True)]
        placed_on = mesh_utils.create_hybrid_device_mesh(
            inside, across, devices, allow_split_physical_axes=True
        )
    else:
        placed_on = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed_on, tuple(sizes), axis_types=auto)


def _train_of(layout: Layout, workload: Workload, outputs: bool) -> ModuleType:
    """The ``train.py`` of a program that has none beside it."""
    mesh = meshes.Mesh(tuple(layout.mesh), tuple(layout.mesh.values()))
    settings, slots = layout.settings, SLOTS.get(workload.optimizer, ())
    how = How(
        mesh, settings.zero, settings.microbatches, workload.clip_norm, slots=slots, outputs=outputs
    )
    return run_program(train_text(how), "<train.py>")


def placed(mesh: Mesh, specs: Any) -> Any:
    """Shardings on ``mesh`` for a tree of partition specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
