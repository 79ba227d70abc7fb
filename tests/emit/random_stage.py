"""A random legal spread: a random strategy for every op, random shared copies and storage."""

from __future__ import annotations

import random
from collections.abc import Mapping

from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import BATCH_AXES
from autopar.lowering.spread import lower
from autopar.lowering.stages import updated_buffers
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.sharding import Placement, Sharding, split
from autopar.rules.batch import batch_flow
from autopar.rules.cut import BatchCut, Cut
from autopar.rules.registry import bind
from autopar.rules.reshard import reshard
from autopar.rules.strategies import flows, shardings, strategies


class Chooser:
    """Goes through the ops in order; what cannot be reached is drawn again."""

    def __init__(
        self,
        captured: Captured,
        mesh: Mesh,
        microbatches: int,
        seed: int,
        whole: float = 0.2,
        even: bool = False,
    ) -> None:
        """``whole``: how often an op is left as it is on the model axes; ``even``: all pieces of a
        tensor are of one length, as JAX has them."""
        self.even = even
        self.captured = captured
        self.stage_mesh = mesh
        self.mesh = Mesh((MICROBATCH, *mesh.axes), (microbatches, *mesh.sizes)).trimmed()
        model = [(a, n) for a, n in zip(mesh.axes, mesh.sizes, strict=True) if a not in BATCH_AXES]
        self.model = Mesh(tuple(a for a, _ in model), tuple(n for _, n in model)).trimmed()
        self.random = random.Random(seed)
        self.whole = whole
        self.microbatches = microbatches
        self.dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
        self.flow = batch_flow(captured.graph, self.dims)
        self.ops: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self.parameters: dict[str, str] = {}

    def spread(self) -> Spread:
        for name, block in self.captured.graph.blocks.items():
            updated = updated_buffers(block.body.ops)
            entering = {
                n: Sharding() if n in updated else self._entering(name, block.body.tensors[n])
                for n in block.body.inputs
            }
            self._graph(block.body, name, entering)
        self._graph(self.captured.graph, None, {})
        return Spread(self.stage_mesh, self.ops, self.shared, self.parameters)

    def _entering(self, block: str, tensor: Tensor) -> Sharding:
        data = self.flow.choices.get(key(block, tensor.name), "")
        batch = Placement.parse(data) if data else Placement("R")
        if batch.kind == "D" and not tensor.differentiable:
            batch = Placement("R")
        chosen = self._placements(tensor)
        self.shared[key(block, tensor.name)] = str(chosen)
        return Sharding.of((a, batch if a in BATCH_AXES else chosen.on(a)) for a in self.mesh.axes)

    def _placements(self, tensor: Tensor) -> Sharding:
        """A random placement on each model axis that can hold it evenly."""
        pairs = []
        left = list(tensor.shape)
        for axis, size in zip(self.model.axes, self.model.sizes, strict=True):
            options = [Placement("R")] + ([Placement("D")] if tensor.differentiable else [])
            options += [split(d) for d, n in enumerate(left) if n % size == 0 and d > 0]
            chosen = self.random.choice(options)
            if chosen.kind == "S":
                left[chosen.dim] //= size
            pairs.append((axis, chosen))
        return Sharding.of(pairs)

    def _graph(self, graph: Graph, block: str | None, entering: Mapping[str, Sharding]) -> None:
        shared: dict[str, Sharding] = dict(entering)
        updated = updated_buffers(graph.ops)
        readers = {n: len(r) for n, r in graph.consumers().items()}
        for name in graph.outputs:
            readers[name] += 1

        def settle(tensor: Tensor, produced: Sharding) -> None:
            shared[tensor.name] = produced
            if tensor.name in updated:  # every reader takes it as it is stored
                return
            if readers[tensor.name] < 2 or self.random.random() < 0.3:
                return
            for _ in range(4):
                model = self._placements(tensor)
                wanted = Sharding.of(
                    (a, produced.on(a) if a in BATCH_AXES else model.on(a)) for a in self.mesh.axes
                )
                if self._reaches(tensor, produced, wanted):
                    shared[tensor.name] = wanted
                    self.shared[key(block, tensor.name)] = str(model)
                    return

        for tensor in graph.tensors.values():
            if tensor.name in entering:
                continue
            if tensor.role == "input":
                dim = self.dims.get(tensor.name)
                batch = Placement("R") if dim is None else split(dim)
                settle(tensor, Sharding.of((a, batch) for a in self.mesh.axes if a in BATCH_AXES))
            elif tensor.role in ("parameter", "buffer"):
                stored = self._placements(tensor) if tensor.role == "parameter" else Sharding()
                if tensor.role == "parameter":
                    self.parameters[key(block, tensor.name)] = str(stored)
                batch = Placement("D" if tensor.differentiable else "R")
                settle(
                    tensor,
                    Sharding.of(
                        (a, batch if a in BATCH_AXES else stored.on(a)) for a in self.mesh.axes
                    ),
                )
        for op in graph.ops:
            if op.kind == "block":
                body = self.captured.graph.blocks[op.attrs["block"]].body
                made = self._body_outputs(op.attrs["block"])
                for outer, produced in zip(op.outputs, made, strict=True):
                    settle(graph.tensors[outer], produced)
                assert len(body.outputs) == len(op.outputs)
                continue
            bound = bind(op, graph.tensors)
            into, out = flows(op, graph.tensors)
            every = [str(s) for s in strategies(bound, self.model, any(out))] or ["whole"]
            data = self.flow.choices[key(block, op.name)]
            # Statistics that several calls update are held whole.
            shares = any(
                _is_statistic(op, n, graph) and (readers[n] > 1 or n in graph.inputs)
                for n in op.inputs
            )
            for attempt in range(12):
                chosen = self.random.choice(every)
                if attempt == 11 or shares or self.random.random() < self.whole:
                    chosen = "whole"
                strategy = _combined(chosen, data, self.mesh)
                wants, gives = shardings(bound, strategy, self.mesh, into, out)
                named = zip((*op.inputs, *op.outputs), (*wants, *gives), strict=True)
                if self.even and not all(self._is_even(graph.tensors[n], s) for n, s in named):
                    continue
                if all(
                    _is_statistic(op, n, graph)
                    or self._reaches(graph.tensors[n], shared[n], w, grad)
                    for n, w, grad in zip(op.inputs, wants, into, strict=True)
                ):
                    break
            for name, want in zip(op.inputs, wants, strict=True):
                if _is_statistic(op, name, graph):  # updated in place, so stored as it is used
                    model = Sharding(
                        tuple((a, p) for a, p in want.placements if a not in BATCH_AXES)
                    )
                    self.parameters[key(block, name)] = str(model)
            self.ops[key(block, op.name)] = chosen
            for name, produced in zip(op.outputs, gives, strict=True):
                settle(graph.tensors[name], produced)
        self._outputs = {n: shared[n] for n in graph.outputs}
        if block is not None:
            self._made[block] = [shared[n] for n in graph.outputs]

    @property
    def _made(self) -> dict[str, list[Sharding]]:
        if not hasattr(self, "_made_"):
            self._made_: dict[str, list[Sharding]] = {}
        return self._made_

    def _body_outputs(self, block: str) -> list[Sharding]:
        return self._made[block]

    def _is_even(self, tensor: Tensor, sharding: Sharding) -> bool:
        ways = [1] * len(tensor.shape)
        for axis, placement in sharding.placements:
            if placement.kind == "S":
                ways[placement.dim] *= self.mesh.size(axis)
        return all(n % w == 0 for n, w in zip(tensor.shape, ways, strict=True))

    def _reaches(
        self, tensor: Tensor, source: Sharding, target: Sharding, grad: bool | None = None
    ) -> bool:
        grad = tensor.differentiable if grad is None else grad
        return reshard(source, target, tensor.shape, self.mesh, grad) is not None


def _is_statistic(op: Op, name: str, graph: Graph) -> bool:
    held = graph.tensors[name].role == "buffer" or name in updated_buffers([op])
    return op.kind == "batch_norm" and held


def _combined(model: str, data: str, mesh: Mesh):  # type: ignore[no-untyped-def]
    from autopar.rules.strategies import Strategy

    parsed = Strategy.parse(model)
    return Strategy(
        tuple((a, c) for a in mesh.axes if (c := data if a in BATCH_AXES else parsed.on(a)))
    )


def random_stage(
    captured: Captured, mesh: Mesh, microbatches: int, seed: int, even: bool = False
) -> Spread:
    """A spread that `lower` accepts; ``even``: see `Chooser`."""
    whole = random.Random(seed).random() / 2
    chooser = Chooser(captured, mesh, microbatches, seed, whole, even)
    spread = chooser.spread()
    lower(captured.graph, spread, microbatches, BatchCut(Cut(chooser.dims, chooser.flow.choices)))
    return spread
