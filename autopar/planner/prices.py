"""The additive prices that searchers minimise, in whole picoseconds.

Integers, so that a folded problem's objective equals the same plan priced op by op on the unfolded
graph exactly. Prices are for one microbatch on one rank; the callers multiply by how often it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_models.compute import op_time_s
from autopar.lowering import LoweredOp, internal_collectives
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Tensor
from autopar.nouns.mesh import Mesh
from autopar.planner.moves import move_time_s
from autopar.rules.resharding import Collective, Step, collectives
from autopar.rules.work import Work, op_work

PICOSECONDS = 10**12


@dataclass(slots=True)
class Prices:
    """Prices on one cluster and mesh (with its ``microbatch`` axis); repeats are looked up."""

    cluster: Cluster
    mesh: Mesh
    precision: str
    _ops: dict[tuple[object, ...], int] = field(default_factory=dict)
    _moves: dict[Collective, int] = field(default_factory=dict)

    def collective(self, moved: Collective) -> int:
        """Picoseconds of one collective."""
        found = self._moves.get(moved)
        if found is None:
            seconds = move_time_s(self.cluster, self.mesh, moved.kind, moved.axis, moved.size_bytes)
            found = self._moves[moved] = round(seconds * PICOSECONDS)
        return found

    def steps(self, steps: tuple[Step, ...], tensor: Tensor, grad: bool) -> tuple[int, int]:
        """(forward, backward) picoseconds of a resharding; backward only where ``grad`` flows."""
        forward = backward = 0
        if steps:
            for moved in collectives(steps, tensor.dtype, self.mesh, "forward"):
                forward += self.collective(moved)
            for moved in collectives(steps, tensor.dtype, self.mesh, "backward") if grad else ():
                backward += self.collective(moved)
        return forward, backward

    def op(self, op: LoweredOp, tensors: Mapping[str, Tensor]) -> int:
        """Picoseconds of an op under its strategy, both ways, with its own collectives."""
        forward, backward = self.compute(op, tensors)
        inside = sum(self.collective(moved) for _, moved in internal_collectives(op, self.mesh))
        return forward + backward + inside

    def compute(self, op: LoweredOp, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """(forward, backward) picoseconds of the arithmetic alone."""
        assert op.bound is not None
        if op.bound.rule.view:
            return 0, 0
        work = op_work(op.op, op.bound, op.strategy, self.mesh, tensors)
        return self._time(work, forward=True), self._time(work, forward=False)

    def _time(self, work: Work, forward: bool) -> int:
        flops = work.forward_flops if forward else work.backward_flops
        moved = work.forward_bytes if forward else work.backward_bytes
        if not flops and not moved:
            return 0
        place = (work.dtype, work.kind, forward, flops, moved)
        found = self._ops.get(place)
        if found is None:
            way = "forward" if forward else "backward"
            seconds = op_time_s(self.cluster, flops, moved, work.dtype, work.cost, work.kind, way)
            found = self._ops[place] = round(seconds * PICOSECONDS)
        return found
