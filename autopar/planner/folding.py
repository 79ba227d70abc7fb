"""A stage as a `Problem` on the folded graph, and the way back.

Nodes are ops (their strategies), tensors with several readers and block inputs (the sharding of
the copy that they share), and parameters with several readers (how they are stored). A block's
ops stand once and count as often as the block is called; an edge as often as it occurs between
calls. So the optimum of the folded problem is the optimum among plans that treat equal layers
equally, and its objective is exactly that of the lifted plan (`autopar.planner.repricing`).

Where the mesh has data axes the batch is theirs: model axes split everything else. (A batch split
over ``tp`` is data parallelism without state sharding, which the data axes do better.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.lowering import BATCH_AXES, LoweredOp, Operand
from autopar.nouns.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Stage, key
from autopar.nouns.problem import FORBIDDEN, Problem
from autopar.nouns.sharding import DEFERRED, WHOLE, Placement, Sharding
from autopar.planner.bindings import Bindings
from autopar.planner.prices import Prices
from autopar.planner.saved import saved_bytes
from autopar.planner.state_prices import StatePrices
from autopar.rules.notation import BoundRule
from autopar.rules.resharding import reshard
from autopar.rules.strategies import Strategy, flows, shardings, strategies

PRODUCTS = ("matmul", "conv", "attention")
Matrix = npt.NDArray[np.int64]


@dataclass(slots=True)
class Node:
    """One node of the problem: its options, what they cost, and what they give."""

    key: str
    kind: str  # op | shared | parameter
    options: list[str]
    costs: list[int]
    usages: list[int]
    count: int
    results: dict[str, list[Sharding]] = field(default_factory=dict)
    """For each tensor that the node gives: its sharding under each option."""


class NoStrategy(ValueError):
    """An op has no legal strategy on the mesh."""


@dataclass(slots=True)
class Folded:
    """The problem and what its nodes mean."""

    problem: Problem
    nodes: list[Node]
    mesh: Mesh

    def stage(self, choice: Iterable[int]) -> Stage:
        """The decisions of one answer."""
        ops: dict[str, str] = {}
        shared: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for node, picked in zip(self.nodes, choice, strict=True):
            option = node.options[picked]
            if node.kind == "op":
                if option != "whole":
                    ops[node.key] = option
                for name, stored in node.results.items():
                    if name.startswith("parameter:"):
                        text = _model_text(stored[picked])
                        if text != "R":
                            parameters[name.removeprefix("parameter:")] = text
            elif node.kind == "shared":
                shared[node.key] = option
            elif option != "R":
                parameters[node.key] = option
        mesh = Mesh(
            tuple(a for a in self.mesh.axes if a != "microbatch"),
            tuple(
                s for a, s in zip(self.mesh.axes, self.mesh.sizes, strict=True) if a != "microbatch"
            ),
        )
        return Stage(mesh, ops, shared, parameters)


def fold(
    graph: Graph,
    mesh: Mesh,
    data_choices: Mapping[str, str],
    batch_dims: Mapping[str, int],
    prices: Prices,
    state: StatePrices,
    bindings: Bindings,
    usage_limit: int | None = None,
    must_split: bool = False,
    recompute: bool = False,
) -> Folded:
    """Builds the folded problem on ``mesh`` (with its ``microbatch`` axis in front, trimmed).

    ``must_split``: products that a model axis can split are split. ``recompute``: of a block's
    activations only the inputs outlive a call.

    Raises `NoStrategy` where the batch cannot be cut as the data axes ask.
    """
    builder = _Builder(graph, mesh, data_choices, batch_dims, prices, state, bindings)
    builder.must_split, builder.recompute = must_split, recompute
    builder.build()
    return builder.finish(usage_limit)


class _Builder:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        data_choices: Mapping[str, str],
        batch_dims: Mapping[str, int],
        prices: Prices,
        state: StatePrices,
        bindings: Bindings,
    ) -> None:
        self.bindings = bindings
        self.must_split = self.recompute = False
        self.legal: dict[tuple[str | None, str], tuple[BoundRule, list[Strategy]]] = {}
        self.graph = graph
        self.mesh = mesh
        self.data_choices = data_choices
        self.batch_dims = batch_dims
        self.prices = prices
        self.state = state
        self.times = mesh.size("microbatch")
        self.nodes: list[Node] = []
        self.edges: dict[tuple[int, int], Matrix] = {}
        self.source: dict[tuple[str | None, str], tuple[int, str]] = {}
        self.fixed: dict[tuple[str | None, str], Sharding] = {}
        self.move_cache: dict[tuple[object, ...], int] = {}

    # -- scopes ----------------------------------------------------------------------------------

    def build(self) -> None:
        calls = self.calls = {name: 0 for name in self.graph.blocks}
        for op in self.graph.ops:
            if op.kind == "block":
                calls[op.attrs["block"]] += 1
        for name, block in self.graph.blocks.items():
            copies = len(dict.fromkeys(block.instances))
            self._scope(name, block.body, calls[name], copies)
        self._scope(None, self.graph, 1, 1)

    def _scope(self, scope: str | None, graph: Graph, calls: int, copies: int) -> None:
        readers = graph.consumers()
        outputs = set(graph.outputs)
        many = {
            n
            for n, uses in readers.items()
            if len(uses) + (n in outputs) > 1
            or (graph.tensors[n].role == "parameter" and any(o.kind == "block" for o, _ in uses))
        }
        for tensor in graph.tensors.values():
            if tensor.role in ("parameter", "buffer"):
                if tensor.role == "parameter" and tensor.name in many:
                    self._parameter_node(scope, graph, tensor, readers[tensor.name], copies)
                elif tensor.role == "buffer" and not self._updated(tensor.name, readers):
                    self.fixed[scope, tensor.name] = Sharding()
            elif tensor.name in graph.inputs:
                if scope is None:
                    self._given(scope, graph, tensor, readers, many)
                else:
                    self._entry(scope, graph, tensor, readers)
        for op in graph.ops:
            if op.kind == "block":
                self._call(graph, op, many, readers)
                continue
            index = self._op_node(scope, graph, op, many, calls, copies)
            for name in op.outputs:
                self._publish(scope, graph, name, index, many, readers, calls)
        if scope is None:
            for name in graph.outputs:
                self._to_output(graph, name)

    # -- nodes -----------------------------------------------------------------------------------

    def _bound(self, scope: str | None, graph: Graph, op: Op) -> tuple[BoundRule, list[Strategy]]:
        found = self.legal.get((scope, op.name))
        if found is None:
            bound = self.bindings.of(scope, op, graph)
            grad = any(flows(op, graph.tensors)[1])
            data = self.data_choices[key(scope, op.name)]
            pinned = {a: data for a in self.mesh.axes if a in BATCH_AXES}
            legal = strategies(bound, self.mesh, grad, pinned)
            if data in bound.factors:
                model = self._model_axes()
                legal = [s for s in legal if all(s.on(a) != data for a in model)]
            if self.must_split and bound.rule.cost in PRODUCTS:
                split = [s for s in legal if self._splits(s, bound)]
                legal = split or legal
            found = self.legal[scope, op.name] = (bound, legal)
        bound, legal = found
        if not legal:
            raise NoStrategy(
                f"op {op.kind} at {op.source} cannot be cut by {self.mesh} (rule {bound})"
            )
        return bound, legal

    def _splits(self, strategy: Strategy, bound: BoundRule) -> bool:
        return any(strategy.on(a) in bound.factors for a in self._model_axes())

    def _op_node(
        self, scope: str | None, graph: Graph, op: Op, many: set[str], calls: int, copies: int
    ) -> int:
        bound, legal = self._bound(scope, graph, op)
        into, out = flows(op, graph.tensors)
        wants: list[list[Sharding]] = [[] for _ in op.inputs]
        node = Node(key(scope, op.name), "op", [], [], [], calls)
        node.results = {n: [] for n in op.outputs}
        saved = self.bindings.saved_by(scope, op, graph)
        alive = 1 if self.recompute else calls
        for strategy in legal:
            operands, results = shardings(bound, strategy, self.mesh, into, out)
            lowered = LoweredOp(
                op,
                bound,
                strategy,
                tuple(
                    Operand(n, w, (), g) for n, w, g in zip(op.inputs, operands, into, strict=True)
                ),
                results,
            )
            cost = self.prices.op(lowered, graph.tensors) * calls * self.times
            usage = saved_bytes(lowered, graph.tensors, self.mesh, saved) * alive
            node.options.append(
                str(Strategy(tuple((a, c) for a, c in strategy.choices if a not in BATCH_AXES)))
            )
            node.costs.append(cost)
            node.usages.append(usage)
            for want, sharding in zip(wants, operands, strict=True):
                want.append(sharding)
            for name, sharding in zip(op.outputs, results, strict=True):
                node.results[name].append(sharding)
        index = len(self.nodes)
        self.nodes.append(node)
        for position, name in enumerate(op.inputs):
            tensor = graph.tensors[name]
            if self._owned(scope, tensor, many):
                self._own_parameter(scope, node, tensor, wants[position], copies)
            elif (scope, name) in self.fixed:
                given = self.fixed[scope, name]
                self._unary(node, tensor, given, wants[position], calls, into[position])
            else:
                source = self.source[scope, name]
                self._edge(source, index, tensor, wants[position], calls, into[position])
        return index

    def _updated(self, name: str, readers: Mapping[str, list[tuple[Op, int]]]) -> bool:
        """A buffer that its one reader writes (running statistics)."""
        uses = readers[name]
        return len(uses) == 1 and bool(uses[0][0].attrs.get("updates_buffers"))

    def _owned(self, scope: str | None, tensor: Tensor, many: set[str]) -> bool:
        """Stored as its one reader wants it: each rank has, and updates, the piece that it uses."""
        if tensor.role == "buffer":
            return (scope, tensor.name) not in self.fixed
        return tensor.role == "parameter" and tensor.name not in many

    def _own_parameter(
        self, scope: str | None, node: Node, tensor: Tensor, wants: list[Sharding], copies: int
    ) -> None:
        """A parameter with one reader is stored as its reader wants it.

        One that joins a partial sum is stored whole and counts on the first rank alone.
        """
        stored = []
        for i, want in enumerate(wants):
            sharding = Sharding.of(
                (a, WHOLE if p.kind == "P" else p)
                for a, p in _model_part(want, self.mesh).placements
            )
            stored.append(sharding)
            node.costs[i] += self.state.price(tensor, sharding) * copies
            node.usages[i] += self.state.bytes(tensor, sharding) * copies
        node.results["parameter:" + key(scope, tensor.name)] = stored

    def _parameter_node(
        self,
        scope: str | None,
        graph: Graph,
        tensor: Tensor,
        uses: list[tuple[Op, int]],
        copies: int,
    ) -> None:
        grad = DEFERRED if tensor.differentiable else WHOLE
        options = {Sharding(), Sharding.of((a, grad) for a in self._model_axes())}
        for op, position in uses:
            if op.kind == "block":
                continue
            bound, legal = self._bound(scope, graph, op)
            for strategy in legal:
                operands, _ = shardings(bound, strategy, self.mesh, *flows(op, graph.tensors))
                options.add(_model_part(operands[position], self.mesh))
        ordered = sorted((o for o in options if not _has(o, "P")), key=str)
        batch = DEFERRED if tensor.differentiable else WHOLE
        node = Node(
            key(scope, tensor.name),
            "parameter",
            [str(o) for o in ordered],
            [self.state.price(tensor, o) * copies for o in ordered],
            [self.state.bytes(tensor, o) * copies for o in ordered],
            copies,
        )
        node.results[tensor.name] = [
            Sharding.of((a, batch if a in BATCH_AXES else o.on(a)) for a in self.mesh.axes)
            for o in ordered
        ]
        self.source[scope, tensor.name] = (len(self.nodes), tensor.name)
        self.nodes.append(node)

    def _given(
        self,
        scope: str | None,
        graph: Graph,
        tensor: Tensor,
        readers: Mapping[str, list[tuple[Op, int]]],
        many: set[str],
    ) -> None:
        """A batch input: whole on the model axes, cut by the data axes."""
        dim = self.batch_dims.get(tensor.name)
        batch = WHOLE if dim is None else Placement("S", dim)
        produced = Sharding.of((a, batch if a in BATCH_AXES else WHOLE) for a in self.mesh.axes)
        if tensor.name in many:
            index = self._shared_node(scope, graph, tensor, [produced], readers, 1)
            node = self.nodes[index]
            wants = node.results[tensor.name]
            self._unary(node, tensor, produced, wants, 1, tensor.differentiable)
        else:
            self.fixed[scope, tensor.name] = produced

    def _entry(
        self,
        scope: str,
        graph: Graph,
        tensor: Tensor,
        readers: Mapping[str, list[tuple[Op, int]]],
    ) -> None:
        choice = self.data_choices.get(key(scope, tensor.name), "")
        batch = Placement.parse(choice) if choice else WHOLE
        if batch == DEFERRED and not tensor.differentiable:
            batch = WHOLE
        produced = Sharding.of((a, batch if a in BATCH_AXES else WHOLE) for a in self.mesh.axes)
        index = self._shared_node(scope, graph, tensor, [produced], readers, 1)
        if self.recompute and tensor.differentiable:
            node = self.nodes[index]
            for i, sharding in enumerate(node.results[tensor.name]):
                local = math.prod(sharding.local_shape(tensor.shape, self.mesh))
                node.usages[i] += local * DTYPE_BYTES[tensor.dtype] * self.calls[scope]

    def _shared_node(
        self,
        scope: str | None,
        graph: Graph,
        tensor: Tensor,
        produced: list[Sharding],
        readers: Mapping[str, list[tuple[Op, int]]],
        calls: int,
    ) -> int:
        """The copy that several readers share: any sharding that its producer or a reader uses."""
        data = produced[0]
        options = {self._with_data(p, data) for p in produced}
        options.add(self._with_data(Sharding(), data))
        for op, position in readers[tensor.name]:
            if op.kind == "block":
                block = self.graph.blocks[op.attrs["block"]]
                entry, inner = self.source[block.name, block.body.inputs[position]]
                for s in self.nodes[entry].results[inner]:
                    options.add(self._with_data(s, data))
                continue
            bound, legal = self._bound(scope, graph, op)
            for strategy in legal:
                operands, _ = shardings(bound, strategy, self.mesh, *flows(op, graph.tensors))
                options.add(self._with_data(operands[position], data))
        ordered = sorted((o for o in options if not _has(o, "P")), key=str)
        node = Node(
            key(scope, tensor.name),
            "shared",
            [_model_text(o) for o in ordered],
            [0] * len(ordered),
            [0] * len(ordered),
            calls,
        )
        node.results[tensor.name] = ordered
        self.source[scope, tensor.name] = (len(self.nodes), tensor.name)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _publish(
        self,
        scope: str | None,
        graph: Graph,
        name: str,
        index: int,
        many: set[str],
        readers: Mapping[str, list[tuple[Op, int]]],
        calls: int,
    ) -> None:
        """Makes node ``index``, or the shared copy after it, the source of tensor ``name``."""
        produced = self.nodes[index].results[name]
        if name in many:
            shared = self._shared_node(scope, graph, graph.tensors[name], produced, readers, calls)
            wants = self.nodes[shared].results[name]
            tensor = graph.tensors[name]
            self._edge((index, name), shared, tensor, wants, calls, tensor.differentiable)
        else:
            self.source[scope, name] = (index, name)

    def _call(
        self,
        graph: Graph,
        op: Op,
        many: set[str],
        readers: Mapping[str, list[tuple[Op, int]]],
    ) -> None:
        block = self.graph.blocks[op.attrs["block"]]
        for inner, outer in zip(block.body.inputs, op.inputs, strict=True):
            tensor = graph.tensors[outer]
            entry, _ = self.source[block.name, inner]
            wants = self.nodes[entry].results[inner]
            grad = tensor.differentiable and block.body.tensors[inner].differentiable
            if (None, outer) in self.fixed:
                self._unary(self.nodes[entry], tensor, self.fixed[None, outer], wants, 1, grad)
            else:
                self._edge(self.source[None, outer], entry, tensor, wants, 1, grad)
        for inner, outer in zip(block.body.outputs, op.outputs, strict=True):
            source = self.source[block.name, inner]
            self.source[None, outer] = source
            if outer in many:
                produced = self.nodes[source[0]].results[source[1]]
                tensor = graph.tensors[outer]
                shared = self._shared_node(None, graph, tensor, produced, readers, 1)
                wants = self.nodes[shared].results[outer]
                self._edge(source, shared, tensor, wants, 1, tensor.differentiable)

    def _to_output(self, graph: Graph, name: str) -> None:
        """The loss is whole on the model axes, a share of the sum on each data rank."""
        tensor = graph.tensors[name]
        index, inner = self.source[None, name]
        node = self.nodes[index]
        for i, shared in enumerate(node.results[inner]):
            wanted = Sharding.of((a, p) for a, p in shared.placements if a in BATCH_AXES)
            node.costs[i] = _add(
                node.costs[i],
                self._move(tensor, shared, wanted, tensor.differentiable) * self.times,
            )

    # -- costs -----------------------------------------------------------------------------------

    def _move(self, tensor: Tensor, source: Sharding, target: Sharding, grad: bool) -> int:
        place = (source, target, tensor.shape, tensor.dtype, grad)
        found = self.move_cache.get(place)
        if found is None:
            steps = reshard(source, target, tensor.shape, self.mesh, grad)
            found = FORBIDDEN if steps is None else sum(self.prices.steps(steps, tensor, grad))
            self.move_cache[place] = found
        return found

    def _unary(
        self,
        node: Node,
        tensor: Tensor,
        source: Sharding,
        wants: list[Sharding],
        times: int,
        grad: bool,
    ) -> None:
        for i, want in enumerate(wants):
            cost = self._move(tensor, source, want, grad)
            node.costs[i] = _add(node.costs[i], cost * times * self.times)

    def _edge(
        self,
        source: tuple[int, str],
        b: int,
        tensor: Tensor,
        wants: list[Sharding],
        times: int,
        grad: bool,
    ) -> None:
        """Adds the resharding from what node ``source`` gives to what node ``b`` wants."""
        a, inner = source
        gives = self.nodes[a].results[inner]
        rows, row_of = _unique(gives)
        columns, column_of = _unique(wants)
        small = np.array(
            [[self._move(tensor, s, t, grad) for t in columns] for s in rows], np.int64
        ).reshape(len(rows), len(columns))
        weight = times * self.times
        small = np.where(small >= FORBIDDEN, FORBIDDEN, small * weight)
        full = small[np.ix_(row_of, column_of)]
        if a == b:
            node = self.nodes[a]
            for i in range(len(full)):
                node.costs[i] = _add(node.costs[i], int(full[i, i]))
            return
        if a > b:
            a, b, full = b, a, full.T
        known = self.edges.get((a, b))
        self.edges[a, b] = full if known is None else np.minimum(known + full, FORBIDDEN)

    def _model_axes(self) -> list[str]:
        return [a for a in self.mesh.axes if a not in BATCH_AXES]

    def _with_data(self, sharding: Sharding, data: Sharding) -> Sharding:
        return Sharding.of(
            (a, data.on(a) if a in BATCH_AXES else sharding.on(a)) for a in self.mesh.axes
        )

    def finish(self, usage_limit: int | None) -> Folded:
        problem = Problem.build(
            [(n.costs, n.usages, (0, 1)) for n in self.nodes],
            [(a, b, m) for (a, b), m in self.edges.items()],
            usage_limit,
            labels=[[o.split() if o != "whole" else [] for o in n.options] for n in self.nodes],
        )
        return Folded(problem, self.nodes, self.mesh)


def _add(a: int, b: int) -> int:
    return min(a + b, FORBIDDEN)


def _unique(items: list[Sharding]) -> tuple[list[Sharding], list[int]]:
    index: dict[Sharding, int] = {}
    positions = [index.setdefault(s, len(index)) for s in items]
    return list(index), positions


def _has(sharding: Sharding, kind: str) -> bool:
    return any(p.kind == kind and a not in BATCH_AXES for a, p in sharding.placements)


def _model_part(sharding: Sharding, mesh: Mesh) -> Sharding:
    return Sharding.of((a, sharding.on(a)) for a in mesh.axes if a not in BATCH_AXES)


def _model_text(sharding: Sharding) -> str:
    return str(Sharding(tuple((a, p) for a, p in sharding.placements if a not in BATCH_AXES)))
