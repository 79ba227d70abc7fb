"""What the devices of one stage run: a microbatch forward and back, and what ends a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.jax.parallel.gradients import own_pieces
from autopar.runtime.jax.parallel.halves import Halves, Later, halves
from autopar.runtime.jax.parallel.joint import copied_to, in_process
from autopar.runtime.jax.parallel.layout import Layout, paths_of
from autopar.runtime.jax.parallel.outputs import OutputKinds, Outputs
from autopar.runtime.jax.parallel.part import Part
from autopar.runtime.jax.parallel.pieces import Numbers, apart, together
from autopar.runtime.jax.parallel.pull_backs import PullBack
from autopar.runtime.jax.parallel.tables import (
    AGAIN,
    LOSS,
    PIPELINE,
    Array,
    Arrays,
    Stage,
    State,
    Value,
)

Reads = dict[str, dict[str, Array]]
"""What a pass through a stage reads: ``root`` and ``frozen``, parameters in no block as they are
computed with; ``layers`` and ``held``, those of blocks as they are stored, with and without
gradients; ``whole``, those whose gradients are of pieces; ``batch``; ``values``."""


class StageStep(Part):
    """One stage of ``model.py``: its jitted calls, ``held`` being `held_of` its state. ``again``:
    by key, layers (-1: what is in none) that an earlier stage holds too, see `Ties`.

    ``forward(held, batch, i, values)`` takes microbatch i. It gives a dict of values, another of
    the loss and ``outputs`` where they are made here, and a list of what is kept for backward.
    ``backward(held, batch, i, values, kept, coming, so_far)`` gives the gradients of the values
    that it took, of which it reads those ``needed``, and ``so_far`` with those of parameters.
    ``coming``: for each value that was given, its gradients from all readers.
    ``backward_input`` and ``backward_weight`` are that in two parts, of a stage that ``splits`` it.
    ``summed(losses, gradients)`` ends backward; ``updated`` the step. ``stacked(outputs)``: of all
    microbatches together, for each its ``outputs``; their ``kinds`` say how that lies.

    is_here: whether this process has any of the stage's devices, and so calls it.
    splits:  whether I leaves the gradients of parameters to W. Where layers run again, or
             parameters are gathered for each pass, I does all of backward: in two parts it would do
             that twice.
    """

    def __init__(
        self, number: int, stage: Stage, program: ModuleType, workload: Any, train: ModuleType
    ) -> None:
        super().__init__(program, workload, train, Layout.of_stage(program, stage))
        self.number, self.stage = number, stage
        self.mesh = part_of(self.mesh, stage.rank)
        self.is_here = in_process(self.mesh)
        self.batch_specs = {n: s for n, s in program.BATCH.items() if n in stage.takes}
        self.values: Mapping[str, Value] = program.VALUES
        self.taken = tuple(name for name in stage.takes if name in self.values)
        gathers = self.layout.splits_parameters and self.layout.shards
        self.splits = self.layout.settings.recompute == "none" and not gathers
        pieces = PartitionSpec(self.mesh.axis_names)
        self.sharding = NamedSharding(self.mesh, pieces)
        self.pull: PullBack | None = None
        self.needed: tuple[str, ...] = ()
        self.loss_dtype: Any = None
        known = getattr(program, "OUTPUTS", {})
        bare = {name: name.removesuffix(AGAIN) for name in stage.gives}
        self.outputs = {name: own for name, own in bare.items() if own in known}
        self.kinds = OutputKinds([known[n] for n in self.outputs.values()], self.layout.data_axes)
        self.parts: Halves | None = None
        self.again: dict[str, list[int]] = {}
        self._compile(pieces, PartitionSpec())

    def _compile(self, pieces: Any, plain: Any) -> None:
        held, batch = held_of(self.state_specs), self.batch_specs
        reduced = self.layout.specs(cut=True)
        given = (held, batch, plain, pieces)
        self.forward = self.jitted(self._forward, given, (pieces, pieces, pieces))
        self.backward = self.jitted(
            self._backward, (*given, pieces, pieces, pieces), (pieces, pieces), donate=(6,)
        )
        if self.splits:
            self.backward_input = self.jitted(
                self._backward_input, (*given, pieces, pieces), (pieces, pieces)
            )
            self.backward_weight = self.jitted(
                self._backward_weight, (*given, pieces, pieces, pieces), pieces, donate=(6,)
            )
        self.evaluated = self.jitted(self._evaluated, given, (pieces, pieces))
        self.loss_of = self.jitted(self._loss_of, (pieces,), plain)
        self.stacked = self.jitted(self._stacked, (pieces,), self.kinds.specs)
        self.nothing = self.jitted(self._nothing, (held,), pieces)
        self.summed = self.jitted(self._summed, (pieces, pieces), (plain, reduced))
        adds = hasattr(self.train, "totals")
        self.totals: Any = self.jitted(self._totals, (reduced,), plain) if adds else None
        self.updated = self.jitted(
            self._updated,
            (self.state_specs, reduced, *[plain] * adds),
            (self.state_specs, plain),
            donate=(0,),
        )

    def here(self, tree: Any) -> Any:
        """What is whole on every device of another stage, on those of this one."""
        return copied_to(self.mesh, tree)

    def promised(self) -> dict[str, Any]:
        """The pieces that it gives to others, as model.py has them: as shapes."""
        made: dict[str, Any] = {}
        for name in (name for name in self.stage.gives if name in self.values):
            value = self.values[name]
            rows, *rest = value.shape or (1,)
            shape = rows * self.mesh.size, *rest
            pieces = jax.ShapeDtypeStruct(shape, value.dtype, sharding=self.sharding)
            made[name] = pieces if value.shape else Numbers(pieces)
        return made

    # -- on the pieces of one device -------------------------------------------------------------

    def _forward(
        self, held: State, batch: Arrays, number: Array, values: Arrays
    ) -> tuple[Any, Any, Any]:
        known = self._known(held, batch, number, apart(values))

        def run(trained: Any, passed: Arrays) -> tuple[Arrays, Arrays]:
            return self._run(known, trained, passed)

        outputs, pull, beside = jax.vjp(run, *self._differentiated(known), has_aux=True)
        self.pull, kept = PullBack.of(pull, dict(paths_of(known)))
        self.needed = tuple(name for name in self.taken if f"values.{name}" in self.pull.names)
        values, losses = self._apart({**outputs, **beside})
        return together(values), together(losses), together(kept)

    def _backward(
        self,
        held: State,
        batch: Arrays,
        number: Array,
        values: Arrays,
        kept: Sequence[Array],
        coming: Mapping[str, Sequence[Array]],
        so_far: Arrays,
    ) -> tuple[Arrays, Arrays]:
        gradients = self._gradients(held, coming)
        known = self._known(held, batch, number, apart(values))
        passed, own = self._pulled(held, known, apart(kept), gradients)
        return together(passed), together({k: g + own[k] for k, g in apart(so_far).items()})

    def _backward_input(
        self,
        held: State,
        batch: Arrays,
        number: Array,
        values: Arrays,
        kept: Sequence[Array],
        coming: Mapping[str, Sequence[Array]],
    ) -> tuple[Arrays, Later]:
        """I: gradients of values that were taken, and what W is given of it."""
        gradients = self._gradients(held, coming)
        self.parts, flat = self._halved((held, batch, number, values, kept), gradients)
        made, later = self.parts.run_first(dict(enumerate(flat)))
        return together(dict(zip(self._passed, made, strict=True))), together(later)

    def _backward_weight(
        self,
        held: State,
        batch: Arrays,
        number: Array,
        values: Arrays,
        kept: Sequence[Array],
        later: Later,
        so_far: Arrays,
    ) -> Arrays:
        """W: ``so_far`` with the gradients of parameters. It runs what I was split into: traced
        again, from shapes, gradients would not lie on the mesh and equations would be others."""
        assert self.parts is not None, "I comes first"
        flat = jax.tree.leaves((held, batch, number, values, kept), is_leaf=lambda x: x is None)
        given = {place: flat[place] for place in self.parts.reads}
        made = self.parts.run_second(given, apart(later))
        own = dict(zip(sorted(so_far), made, strict=True))
        added: Arrays = together({k: g + own[k] for k, g in apart(so_far).items()})
        return added

    def pending(self, given: tuple[State, Arrays, Any], kept: Any) -> Any:
        """What W reads of ``kept``, values and pieces from forward, behind what is ``given`` of all
        microbatches; None in place of all else."""
        assert self.parts is not None, "I comes first"
        first = len(jax.tree.leaves(given))
        arrays, structure = jax.tree.flatten(kept)
        read = [x if first + i in self.parts.reads else None for i, x in enumerate(arrays)]
        return jax.tree.unflatten(structure, read)

    @property
    def _passed(self) -> list[str]:
        """Names of the values whose gradients go back, in the order of a dict's leaves."""
        return sorted(name for name in self.taken if self.values[name].gradient)

    def _halved(self, given: Any, gradients: Any) -> tuple[Halves, list[Any]]:
        """`_pulled` in halves, and its flat arguments, those that came last."""
        flat, structure = jax.tree.flatten((given, gradients))
        came = len(jax.tree.leaves(gradients))

        def pulled(*arrays: Array) -> list[Array]:
            (held, batch, number, values, kept), gradients = jax.tree.unflatten(structure, arrays)
            known = self._known(held, batch, number, apart(values))
            return list(jax.tree.leaves(self._pulled(held, known, apart(kept), gradients)))

        moved = range(len(flat) - came, len(flat))
        return halves(pulled, flat, moved, wanted=len(self._passed)), flat

    def _gradients(self, held: State, coming: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
        """Of what the stage gave: sums over readers; of the loss 1, or its scale."""
        made = {name: sum(arrays[1:], arrays[0]) for name, arrays in apart(coming).items()}
        if LOSS in self.stage.gives:
            scale = held["scale"]["scale"] if "scale" in held else 1
            made[LOSS] = jnp.asarray(scale, self.loss_dtype)
        return made

    def _pulled(
        self, held: State, known: Reads, kept: Sequence[Array], gradients: Arrays
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Gradients of the values that were taken, and of parameters."""
        assert self.pull is not None, "a stage goes forward first"
        trained, passed = self.pull.function(kept, dict(paths_of(known)))(gradients)
        _, pull = jax.vjp(lambda own: self._root(own, held["params"]), self._own_root(held))
        own = {**trained["layers"], **pull(trained["root"])[0]}
        if "scale" in held:
            own = {k: (g / held["scale"]["scale"]).astype(g.dtype) for k, g in own.items()}
        return passed, own

    def _evaluated(
        self, held: State, batch: Arrays, number: Array, values: Arrays
    ) -> tuple[Arrays, Arrays]:
        known = self._known(held, batch, number, apart(values))
        outputs, beside = self._run(known, *self._differentiated(known))
        values, losses = self._apart({**outputs, **beside})
        return together(values), together(losses)

    def _nothing(self, held: State) -> Arrays:
        """Gradients of nothing, to add to."""
        own = self._own(held["params"])
        made: Arrays = together({k: jnp.zeros_like(x) for k, x in own.items()})
        return made

    def _summed(self, losses: Sequence[Array], gradients: Arrays) -> tuple[Array, Arrays]:
        made: tuple[Array, Arrays] = self.train.summed(self, _loss_of_all(losses), apart(gradients))
        return made

    def _loss_of(self, losses: Sequence[Array]) -> Array:
        loss, axes = _loss_of_all(losses), self.layout.data_axes
        return lax.psum(loss, axes) if axes else loss

    def _stacked(self, outputs: Sequence[Sequence[Array]]) -> Outputs:
        every = zip(*apart(outputs), strict=True)
        return self.kinds.reduced([jnp.stack(of_each) for of_each in every])

    def _totals(self, gradients: Arrays) -> Any:
        return self.train.totals(self, gradients)

    def _updated(self, state: State, gradients: Arrays, *totals: Any) -> tuple[State, Array]:
        made: tuple[State, Array] = self.train.update(self, state, gradients, *totals)
        return made

    # -- a pass through the stage ----------------------------------------------------------------

    def _known(self, held: State, batch: Arrays, number: Array, values: Arrays) -> Reads:
        params, frozen = held["params"], held["frozen"]
        layers, root = self._own(params), self.layout.root
        still = {k: leaf for k, leaf in root.items() if k in frozen}
        return {
            "root": self._root(self._own_root(held), params),
            "frozen": self.prepared(still, {k: frozen[k] for k in still}),
            "layers": {k: x for k, x in layers.items() if k not in root},
            "held": {k: x for k, x in frozen.items() if k not in root},
            "whole": dict(params) if self.layout.pairs else {},
            "batch": self.computing({name: entry[number] for name, entry in batch.items()}),
            "values": dict(values),
        }

    def _own(self, params: Arrays) -> dict[str, Array]:
        """What gradients are of."""
        return own_pieces(self.layout, params) if self.layout.pairs else dict(params)

    def _own_root(self, held: State) -> dict[str, Array]:
        root = self.layout.root
        return {k: x for k, x in self._own(held["params"]).items() if k in root}

    def _root(self, own: Arrays, params: Arrays) -> dict[str, Array]:
        """Trained parameters that are in no block as they are computed with."""
        leaves = {k: self.layout.leaves[k] for k in own}
        return self.prepared(leaves, self.paired(own, params if self.layout.pairs else {}))

    def _differentiated(self, known: Reads) -> tuple[dict[str, dict[str, Array]], dict[str, Array]]:
        passed = {n: x for n, x in known["values"].items() if self.values[n].gradient}
        return {"root": known["root"], "layers": known["layers"]}, passed

    def _run(
        self, known: Reads, trained: Mapping[str, Arrays], passed: Arrays
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """What the stage gives: with gradients, and without."""
        arrays = {**known["held"], **self.paired(trained["layers"], known["whole"])}
        params: dict[str, Any] = {**known["frozen"], **trained["root"]}
        params |= {block: self.stack(block, arrays) for block in self.stage.layers}
        taken = {**known["batch"], **known["values"], **passed}
        made = self.stage.function(params, *[taken[name] for name in self.stage.takes])
        made = made if isinstance(made, tuple) else (made,)
        given = dict(zip(self.stage.gives, made, strict=True))
        if LOSS in given:
            self.loss_dtype = given[LOSS].dtype
        of_values = {n for n in given if n in self.values and self.values[n].gradient}
        passes = of_values | ({LOSS} & given.keys())
        return (
            {n: x for n, x in given.items() if n in passes},
            {n: x for n, x in given.items() if n not in passes},
        )

    def _apart(self, made: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values, and what is of the step as a whole: the loss and outputs."""
        return (
            {n: x for n, x in made.items() if n in self.values},
            {n: x for n, x in made.items() if n == LOSS or n in self.outputs},
        )


def part_of(mesh: Mesh, rank: int) -> Mesh:
    """The devices of one place on ``pp``, an axis that has one device here."""
    along = mesh.axis_names.index(PIPELINE)
    devices = mesh.devices.take([rank], axis=along)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def held_of(state: State) -> State:
    """What passes through a stage read of its state."""
    return {name: state[name] for name in ("params", "frozen", "scale") if name in state}


def _loss_of_all(losses: Sequence[Array]) -> Array:
    """The sum of shares of the loss, in at least float32; of none 0."""
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in apart(losses)]
    return sum(wide[1:], wide[0]) if wide else jnp.zeros(())
