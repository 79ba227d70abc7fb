"""The additive prices that searchers minimise, in whole picoseconds.

Integers, so that a folded problem's objective equals the same plan priced op by op on the unfolded
graph exactly. Prices are for one microbatch on one rank; the callers multiply by how often it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_models.compute import added_time_s, beside_product_s, op_rate, op_time_s
from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.pricing.narrow import added_of, again_s, settled
from autopar.pricing.rings import bare
from autopar.pricing.software.figures import Figures
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.units.moves import move_time_s
from autopar.rules.body_work import with_body_work
from autopar.rules.extents import extents, split_ways
from autopar.rules.fusion import ALONE, Fusion
from autopar.rules.narrow import RECIPE
from autopar.rules.resharding import SHIFT, Collective, Step, collectives
from autopar.rules.strategies import flows
from autopar.rules.work import Work, op_work

PICOSECONDS = 10**12


@dataclass(slots=True)
class Prices:
    """Prices on one cluster and mesh (with its ``microbatch`` axis); repeats are looked up.

    ``fusion``: the kernels that compiled execution makes of the graph's ops. ``trainer``: software
    that runs the graph in place of an emitted program.
    """

    cluster: Cluster
    mesh: Mesh
    precision: str
    fusion: Fusion = ALONE
    trainer: Trainer | None = None
    pieces: tuple[int, ...] = (1,)
    """Of rows, that a collective and the products beside it may run in: `pricing.tp_pieces`."""
    expert_pieces: tuple[int, ...] = (1,)
    """Of tokens, that may travel to their experts apart: `pricing.op_prices`."""
    runs_beside: bool | None = None
    """Whether modules next to routed experts run while tokens travel; None: where that gains."""
    beside: frozenset[str] = frozenset()
    """Keys of the ops of experts that may have one beside (`pricing.op_prices`)."""
    works: dict[tuple[object, ...], Work] = field(default_factory=dict)
    """By op, gradients through it, local extents, and how many ways each of its implementations
    splits it: these do other work on equal pieces. Prices of one graph on other meshes share it.

    Not by ``fusion``: all share one, since a `Solver` lives for one search."""
    figures: dict[Hashable, Figures] = field(default_factory=dict)
    """Of parts of the graph as a trainer runs them; layouts of equal model axes share them."""
    in_pieces: dict[Hashable, Any] = field(default_factory=dict)
    """What `pricing.tp_pieces` and `pricing.op_prices` have priced."""
    _ops: dict[tuple[object, ...], int] = field(default_factory=dict)
    _moves: dict[Collective, int] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> Prices:
        """The same on another mesh of as many devices."""
        return replace(self, mesh=mesh, in_pieces={}, _moves={})

    def collective(self, moved: Collective) -> int:
        """Picoseconds of one collective."""
        price = self._moves.get(moved)
        if price is None:
            seconds = move_time_s(self.cluster, self.mesh, moved.kind, moved.axis, moved.size_bytes)
            price = self._moves[moved] = round(seconds * PICOSECONDS)
        return price

    def collective_s(self, moved: Collective) -> float:
        """Seconds of one collective."""
        return self.collective(moved) / PICOSECONDS

    def steps(
        self, steps: tuple[Step, ...], tensor: Tensor, grad: bool, handed: bool = False
    ) -> tuple[int, int]:
        """(forward, backward) picoseconds of a resharding; backward only where ``grad`` flows.

        ``handed``: from one op of a kernel to another, see `move`.
        """
        forward = backward = 0
        if steps:
            for moved in collectives(steps, tensor.dtype, self.mesh, "forward"):
                forward += self.move(moved, handed)
            for moved in collectives(steps, tensor.dtype, self.mesh, "backward") if grad else ():
                backward += self.move(moved, handed)
        return forward, backward

    def move(self, moved: Collective, handed: bool) -> int:
        """Picoseconds of one collective on its way from op to op.

        Inside a kernel it ends the fusion of what it moves: that is written and read after all.
        """
        if not handed:
            return self.collective(moved)
        bytes_back = 2 * moved.size_bytes
        landing_s = op_time_s(self.cluster, 0.0, bytes_back, self.precision, "elementwise")
        return self.collective(moved) + round(landing_s * PICOSECONDS)

    def settled(self, lowered: Lowered) -> Lowered:
        """The graph with what of its open recipes gains."""
        return settled(lowered, self.cluster.device, self.collective_s)

    def inside(
        self, op: LoweredOp, tensors: Mapping[str, Tensor], scope: str | None
    ) -> tuple[int, int]:
        """(forward, backward) picoseconds of the op's own collectives that its compute leaves bare,
        where tokens travel at once. ``scope``: the block whose body it lies in.

        What passes around a ring of n ranks does so while all of its n blocks but one compute; and
        around a ring of rings, while all rounds of the inner ones but one run.
        """
        shown = {"forward": 0, "backward": 0}
        rings: dict[str, dict[str, tuple[int, int]]] = {"forward": {}, "backward": {}}
        for inside in internal_collectives(op, self.mesh):
            taken, ring = inside.times * self.collective(inside.largest), rings[inside.direction]
            if inside.collective.kind == SHIFT:
                _, before = ring.get(inside.collective.axis, (0, 0))
                ring[inside.collective.axis] = (inside.times, before + taken)
            else:
                shown[inside.direction] += taken
        if rings["forward"] or rings["backward"]:
            forward, backward = self.compute(op, tensors, scope)
            shown["forward"] += bare(forward, list(rings["forward"].values()))
            shown["backward"] += bare(backward, list(rings["backward"].values()))
        return shown["forward"], shown["backward"]

    def compute(
        self, op: LoweredOp, tensors: Mapping[str, Tensor], scope: str | None
    ) -> tuple[int, int]:
        """(forward, backward) picoseconds of the arithmetic alone."""
        assert op.bound is not None
        if op.bound.rule.view:
            return 0, 0
        name = key(scope, op.op.name)
        local = extents(op.bound, op.strategy, self.mesh)
        ways = split_ways(op.strategy, self.mesh) if op.bound.rule.implementations else {}
        runs = (ways.get(each.choice, 1) for each in op.bound.rule.implementations)
        place = (name, flows(op.op, tensors), *local.values(), *runs)
        work = self.works.get(place)
        if work is None:
            fused = self.fusion.moves.get(name)
            given = (op.op, op.bound, op.strategy, self.mesh, tensors)
            work = with_body_work(op_work(*given, fused), *given)
            self.works[place] = work
        ahead, back = self._time(work, forward=True), self._time(work, forward=False)
        if RECIPE not in op.op.attrs:
            return ahead, back
        narrow = added_of(op, tensors, self.mesh, self.cluster.device)
        added = (round(s * PICOSECONDS) for s in (narrow.forward_s, narrow.backward_s))
        return ahead + next(added), back + next(added)

    def scaled_again(self, op: LoweredOp, tensors: Mapping[str, Tensor]) -> int:
        """Picoseconds of what a layer's forward in 8 bits does where it runs again and its product
        is kept; none of others."""
        return round(again_s(op, tensors, self.mesh, self.cluster.device) * PICOSECONDS)

    def added(self, gradient_bytes: int) -> int:
        """Picoseconds of adding gradients to those of the microbatches before."""
        return round(added_time_s(self.cluster.device, gradient_bytes) * PICOSECONDS)

    def _time(self, work: Work, forward: bool) -> int:
        if work.bodies:
            return self._bodies_time(work, forward)
        flops = work.forward_flops if forward else work.backward_flops
        moved = work.forward_bytes if forward else work.backward_bytes
        if not flops and not moved:
            return 0
        launches = work.launches[0 if forward else 1]
        streamed = work.streamed_bytes if forward else work.streamed_back_bytes
        shape = (work.thinness, work.head_dim, work.rows, streamed, work.calls)
        runs = (launches, work.kernel, work.speed, shape)
        place = (work.dtype, work.kind, forward, flops, moved, runs, work.forward_flops)
        price = self._ops.get(place)
        if price is None:
            way = "forward" if forward else "backward"
            rate = op_rate(
                self.cluster.device, work.dtype, work.cost, work.kind, way, work.head_dim,
                work.kernel,
            )  # fmt: skip
            beside_s = beside_product_s(self.cluster.device) if work.cost == "matmul" else 0.0
            launches = launches and not beside_s
            seconds = rate.time_s(flops, moved, launches, work.thinness, work.rows)
            if beside_s and work.forward_flops:
                seconds += work.calls * round(flops / work.forward_flops) * beside_s
            if streamed:
                seconds += op_time_s(self.cluster, 0.0, streamed, work.dtype, "elementwise")
            price = self._ops[place] = round(seconds / work.speed * PICOSECONDS)
        return price

    def _bodies_time(self, work: Work, forward: bool) -> int:
        """Of the dearest body, as often as it runs."""
        if not forward and not work.backward_flops:
            return 0
        dearest = 0
        for each in work.bodies:
            taken = sum(self._time(one, forward) for one in each)
            if work.again and not forward:
                taken += sum(self._time(one, True) for one in each)
            dearest = max(dearest, taken)
        return work.times * dearest
