"""A stage as a `Problem` on the folded graph.

Nodes are ops (their strategies), tensors with several readers and block inputs (the sharding of
the copy that they share), and parameters with several readers (how they are stored). A block's
ops stand once and count as often as the block is called; an edge as often as it occurs between
calls. So the optimum of the folded problem is the optimum among plans that treat equal layers
equally, and its objective is exactly that of the lifted plan (`autopar.planner.repricing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.lowering import BATCH_AXES, MICROBATCH, LoweredOp, Operand
from autopar.nouns.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.sharding import DEFERRED, WHOLE, Placement, Sharding
from autopar.planner.bindings import Bindings
from autopar.planner.ledger import Ledger, capped_sum
from autopar.planner.legal import Legal
from autopar.planner.nodes import OWNED, Folded, Node, model_part, model_text
from autopar.planner.prices import Prices
from autopar.planner.saved import saved_bytes
from autopar.planner.state_prices import StatePrices
from autopar.rules.strategies import Strategy, flows, shardings

Scope = str | None
Readers = Mapping[str, list[tuple[Op, int]]]


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

    ``must_split``: see `Legal`. ``recompute``: of a block's activations only the inputs outlive a
    call.

    Raises `NoStrategy` where the batch cannot be cut as the data axes ask.
    """
    legal = Legal(mesh, data_choices, bindings, must_split)
    ledger = Ledger(mesh, prices, mesh.size(MICROBATCH))
    _Folding(graph, legal, batch_dims, state, ledger, recompute).run()
    return Folded(ledger.problem(usage_limit), ledger.nodes, mesh)


class _Folding:
    """One pass over the graph, bodies of blocks first."""

    def __init__(
        self,
        graph: Graph,
        legal: Legal,
        batch_dims: Mapping[str, int],
        state: StatePrices,
        ledger: Ledger,
        recompute: bool,
    ) -> None:
        self.graph = graph
        self.legal = legal
        self.mesh = ledger.mesh
        self.data_choices = legal.data_choices
        self.batch_dims = batch_dims
        self.state = state
        self.ledger = ledger
        self.recompute = recompute
        self.calls = dict.fromkeys(graph.blocks, 0)
        # Where each tensor comes from: a node and the name that it has there, or a fixed sharding.
        self.source: dict[tuple[Scope, str], tuple[int, str]] = {}
        self.fixed: dict[tuple[Scope, str], Sharding] = {}

    def run(self) -> None:
        for op in self.graph.ops:
            if op.kind == "block":
                self.calls[op.attrs["block"]] += 1
        for name, block in self.graph.blocks.items():
            copies = len(dict.fromkeys(block.instances))
            self._scope(name, block.body, self.calls[name], copies)
        self._scope(None, self.graph, 1, 1)

    def _scope(self, scope: Scope, graph: Graph, calls: int, copies: int) -> None:
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

    def _op_node(
        self, scope: Scope, graph: Graph, op: Op, many: set[str], calls: int, copies: int
    ) -> int:
        bound, legal = self.legal.of(scope, graph, op)
        into, out = flows(op, graph.tensors)
        wants: list[list[Sharding]] = [[] for _ in op.inputs]
        node = Node(key(scope, op.name), "op", [], [], [], calls)
        node.results = {n: [] for n in op.outputs}
        saved = self.legal.bindings.saved_by(scope, op, graph)
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
            cost = self.ledger.prices.op(lowered, graph.tensors) * calls * self.ledger.microbatches
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
        index = self.ledger.add(node)
        for position, name in enumerate(op.inputs):
            tensor = graph.tensors[name]
            if self._owned(scope, tensor, many):
                self._own_parameter(scope, node, tensor, wants[position], copies)
            elif (scope, name) in self.fixed:
                given = self.fixed[scope, name]
                self.ledger.unary(node, tensor, given, wants[position], calls, into[position])
            else:
                source = self.source[scope, name]
                self.ledger.edge(source, index, tensor, wants[position], calls, into[position])
        return index

    def _updated(self, name: str, readers: Readers) -> bool:
        """A buffer that its one reader writes (running statistics)."""
        uses = readers[name]
        return len(uses) == 1 and bool(uses[0][0].attrs.get("updates_buffers"))

    def _owned(self, scope: Scope, tensor: Tensor, many: set[str]) -> bool:
        """Stored as its one reader wants it: each rank has, and updates, the piece that it uses."""
        if tensor.role == "buffer":
            return (scope, tensor.name) not in self.fixed
        return tensor.role == "parameter" and tensor.name not in many

    def _own_parameter(
        self, scope: Scope, node: Node, tensor: Tensor, wants: list[Sharding], copies: int
    ) -> None:
        """A parameter with one reader is stored as its reader wants it.

        One that joins a partial sum is stored whole and counts on the first rank alone.
        """
        stored = []
        for i, want in enumerate(wants):
            sharding = Sharding.of(
                (a, WHOLE if p.kind == "P" else p) for a, p in model_part(want).placements
            )
            stored.append(sharding)
            node.costs[i] += self.state.price(tensor, sharding) * copies
            node.usages[i] += self.state.bytes(tensor, sharding) * copies
        node.results[OWNED + key(scope, tensor.name)] = stored

    def _parameter_node(
        self,
        scope: Scope,
        graph: Graph,
        tensor: Tensor,
        uses: list[tuple[Op, int]],
        copies: int,
    ) -> None:
        grad = DEFERRED if tensor.differentiable else WHOLE
        options = {Sharding(), Sharding.of((a, grad) for a in self.legal.model_axes)}
        for op, position in uses:
            if op.kind == "block":
                continue
            bound, legal = self.legal.of(scope, graph, op)
            for strategy in legal:
                operands, _ = shardings(bound, strategy, self.mesh, *flows(op, graph.tensors))
                options.add(model_part(operands[position]))
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
        self.source[scope, tensor.name] = (self.ledger.add(node), tensor.name)

    def _given(
        self,
        scope: Scope,
        graph: Graph,
        tensor: Tensor,
        readers: Readers,
        many: set[str],
    ) -> None:
        """A batch input: whole on the model axes, cut by the data axes."""
        dim = self.batch_dims.get(tensor.name)
        batch = WHOLE if dim is None else Placement("S", dim)
        produced = Sharding.of((a, batch if a in BATCH_AXES else WHOLE) for a in self.mesh.axes)
        if tensor.name in many:
            index = self._shared_node(scope, graph, tensor, [produced], readers, 1)
            node = self.ledger.nodes[index]
            wants = node.results[tensor.name]
            self.ledger.unary(node, tensor, produced, wants, 1, tensor.differentiable)
        else:
            self.fixed[scope, tensor.name] = produced

    def _entry(
        self,
        scope: str,
        graph: Graph,
        tensor: Tensor,
        readers: Readers,
    ) -> None:
        choice = self.data_choices.get(key(scope, tensor.name), "")
        batch = Placement.parse(choice) if choice else WHOLE
        if batch == DEFERRED and not tensor.differentiable:
            batch = WHOLE
        produced = Sharding.of((a, batch if a in BATCH_AXES else WHOLE) for a in self.mesh.axes)
        index = self._shared_node(scope, graph, tensor, [produced], readers, 1)
        if self.recompute and tensor.differentiable:
            node = self.ledger.nodes[index]
            for i, sharding in enumerate(node.results[tensor.name]):
                local = math.prod(sharding.local_shape(tensor.shape, self.mesh))
                node.usages[i] += local * DTYPE_BYTES[tensor.dtype] * self.calls[scope]

    def _shared_node(
        self,
        scope: Scope,
        graph: Graph,
        tensor: Tensor,
        produced: list[Sharding],
        readers: Readers,
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
                for s in self.ledger.nodes[entry].results[inner]:
                    options.add(self._with_data(s, data))
                continue
            bound, legal = self.legal.of(scope, graph, op)
            for strategy in legal:
                operands, _ = shardings(bound, strategy, self.mesh, *flows(op, graph.tensors))
                options.add(self._with_data(operands[position], data))
        ordered = sorted((o for o in options if not _has(o, "P")), key=str)
        node = Node(
            key(scope, tensor.name),
            "shared",
            [model_text(o) for o in ordered],
            [0] * len(ordered),
            [0] * len(ordered),
            calls,
        )
        node.results[tensor.name] = ordered
        index = self.ledger.add(node)
        self.source[scope, tensor.name] = (index, tensor.name)
        return index

    def _publish(
        self,
        scope: Scope,
        graph: Graph,
        name: str,
        index: int,
        many: set[str],
        readers: Readers,
        calls: int,
    ) -> None:
        """Makes node ``index``, or the shared copy after it, the source of tensor ``name``."""
        produced = self.ledger.nodes[index].results[name]
        if name in many:
            shared = self._shared_node(scope, graph, graph.tensors[name], produced, readers, calls)
            wants = self.ledger.nodes[shared].results[name]
            tensor = graph.tensors[name]
            self.ledger.edge((index, name), shared, tensor, wants, calls, tensor.differentiable)
        else:
            self.source[scope, name] = (index, name)

    def _call(
        self,
        graph: Graph,
        op: Op,
        many: set[str],
        readers: Readers,
    ) -> None:
        block = self.graph.blocks[op.attrs["block"]]
        for inner, outer in zip(block.body.inputs, op.inputs, strict=True):
            tensor = graph.tensors[outer]
            entry, _ = self.source[block.name, inner]
            wants = self.ledger.nodes[entry].results[inner]
            grad = tensor.differentiable and block.body.tensors[inner].differentiable
            if (None, outer) in self.fixed:
                self.ledger.unary(
                    self.ledger.nodes[entry], tensor, self.fixed[None, outer], wants, 1, grad
                )
            else:
                self.ledger.edge(self.source[None, outer], entry, tensor, wants, 1, grad)
        for inner, outer in zip(block.body.outputs, op.outputs, strict=True):
            source = self.source[block.name, inner]
            self.source[None, outer] = source
            if outer in many:
                produced = self.ledger.nodes[source[0]].results[source[1]]
                tensor = graph.tensors[outer]
                shared = self._shared_node(None, graph, tensor, produced, readers, 1)
                wants = self.ledger.nodes[shared].results[outer]
                self.ledger.edge(source, shared, tensor, wants, 1, tensor.differentiable)

    def _to_output(self, graph: Graph, name: str) -> None:
        """The loss is whole on the model axes, a share of the sum on each data rank."""
        tensor = graph.tensors[name]
        index, inner = self.source[None, name]
        node = self.ledger.nodes[index]
        for i, shared in enumerate(node.results[inner]):
            wanted = Sharding.of((a, p) for a, p in shared.placements if a in BATCH_AXES)
            node.costs[i] = capped_sum(
                node.costs[i],
                self.ledger.move(tensor, shared, wanted, tensor.differentiable)
                * self.ledger.microbatches,
            )

    def _with_data(self, sharding: Sharding, data: Sharding) -> Sharding:
        return Sharding.of(
            (a, data.on(a) if a in BATCH_AXES else sharding.on(a)) for a in self.mesh.axes
        )


def _has(sharding: Sharding, kind: str) -> bool:
    return any(p.kind == kind and a not in BATCH_AXES for a, p in sharding.placements)
