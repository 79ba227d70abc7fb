"""One pass over a graph, which adds its nodes and edges to a `Ledger`: bodies of blocks first."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.lowering.lowered import BATCH_AXES
from autopar.lowering.spread import entering_on
from autopar.lowering.stages import updated_buffers
from autopar.nouns.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.nouns.plan import key
from autopar.nouns.problem import FORBIDDEN
from autopar.nouns.sharding import DEFERRED, WHOLE, Placement, Sharding, split
from autopar.planner.problem.codes import Ints
from autopar.planner.problem.ledger import Ledger
from autopar.planner.problem.legal import Legal
from autopar.planner.problem.nodes import OWNED, Node
from autopar.planner.problem.options import distinct, in_order, stored_for
from autopar.planner.problem.posed import Stored
from autopar.planner.problem.tables import Scope, Tables
from autopar.rules.narrow_gathers import narrow_weights
from autopar.rules.strategies import flows

Readers = Mapping[str, list[tuple[Op, int]]]


class GraphPass:
    """What it knows on its way; `stored` are the parameters, with the nodes that they hang on."""

    def __init__(
        self,
        graph: Graph,
        legal: Legal,
        ledger: Ledger,
    ) -> None:
        self.graph = graph
        self.legal = legal
        self.codes = ledger.moves.codes
        self.mesh = self.codes.mesh
        self.cut = legal.cut
        self.ledger = ledger
        self.fusion = ledger.moves.prices.fusion
        self.calls = dict.fromkeys(graph.blocks, 0)
        # Where each tensor comes from: a node and the name that it has there, or a fixed sharding.
        self.source: dict[tuple[Scope, str], tuple[int, str]] = {}
        self.fixed: dict[tuple[Scope, str], int] = {}
        self.tables = Tables(legal, ledger.moves)
        self.stored: list[Stored] = []
        self.narrow: frozenset[str] = frozenset()  # of the part of the graph that is passed

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
        self.narrow = narrow_weights(graph)
        outputs = set(graph.outputs)
        updated = updated_buffers(graph.ops)
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
                    self.fixed[scope, tensor.name] = self.codes.of(Sharding())
            elif tensor.name in graph.inputs:
                if scope is None:
                    self._given(scope, graph, tensor, readers, many)
                elif tensor.name in updated:  # the caller's, who holds it whole
                    self.fixed[scope, tensor.name] = self.codes.of(Sharding())
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
        table = self.tables.of(scope, graph, op)
        into, _ = flows(op, graph.tensors)
        node = Node(
            key(scope, op.name),
            "op",
            table.strategies,
            table.cost * (calls * self.ledger.microbatches),
            table.saved * calls,
            table.saved,
            calls,
            dict(zip(op.outputs, table.gives, strict=True)),
            self.legal.usual(scope, op),
        )
        index = self.ledger.add(node)
        for position, name in enumerate(op.inputs):
            tensor = graph.tensors[name]
            if self._owned(scope, tensor, many):
                self._own_parameter(scope, index, tensor, table.wants[position], copies)
            elif (scope, name) in self.fixed:
                given, wants = self.fixed[scope, name], table.wants[position]
                if op.attrs.get("updates_buffers") and name in op.inputs[-2:]:
                    # Statistics of several calls are held whole, and updated where they are.
                    node.costs = np.where(wants == given, node.costs, FORBIDDEN)
                taken = self.fusion.takes(scope, op, position)
                self.ledger.unary(node, tensor, given, wants, calls, into[position], taken)
            else:
                source, wants = self.source[scope, name], table.wants[position]
                taken = self.fusion.takes(scope, op, position)
                layers = None if name in many else self.tables.neighbours(scope, graph, name)
                self.ledger.edge(source, index, tensor, wants, calls, into[position], taken, layers)
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
        self, scope: Scope, index: int, tensor: Tensor, wants: Ints, copies: int
    ) -> None:
        """A parameter with one reader is stored as its reader wants it."""
        node = self.ledger.nodes[index]
        stored = stored_for(self.codes, node, wants)
        shardings, option_of = distinct(self.codes, stored)
        narrow = tensor.name in self.narrow
        self.stored.append(Stored(index, tensor, shardings, option_of, copies, narrow))
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
        codes = [self.codes.of(Sharding.of((a, grad) for a in self.legal.model_axes)), 0]
        for op, position in uses:
            if op.kind != "block":
                codes += self.tables.of(scope, graph, op).wants[position].tolist()
        options = self.codes.model_part(np.unique(np.array(codes, np.int64)))
        ordered = in_order(self.codes, options) + self._on_batch_axes(grad)
        stored = [self.codes.sharding(c) for c in self.codes.model_part(ordered).tolist()]
        none = np.zeros(len(stored), np.int64)
        node = Node(key(scope, tensor.name), "parameter", stored, none, none, none, copies)
        node.results[tensor.name] = ordered
        index = self.ledger.add(node)
        self.stored.append(Stored(index, tensor, stored, np.arange(len(stored)), copies))
        self.source[scope, tensor.name] = (index, tensor.name)

    def _on_batch_axes(self, placement: Placement) -> int:
        """The code of a sharding that has ``placement`` on the axes that split the batch, whole on
        the others."""
        return self.codes.of(Sharding.of((a, placement) for a in self._batch_axes))

    @property
    def _batch_axes(self) -> list[str]:
        return [a for a in self.mesh.axes if a in BATCH_AXES]

    def _given(
        self,
        scope: Scope,
        graph: Graph,
        tensor: Tensor,
        readers: Readers,
        many: set[str],
    ) -> None:
        """A batch input: whole on the model axes, cut by the data axes."""
        dims = ((a, self.cut.on(a).dims.get(tensor.name)) for a in self._batch_axes)
        produced = self.codes.of(Sharding.of((a, split(d)) for a, d in dims if d is not None))
        if tensor.name in many:
            index = self._shared_node(scope, graph, tensor, np.array([produced]), readers, 1)
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
        where = key(scope, tensor.name)
        enters = ((a, entering_on(a, tensor, self.cut, where)) for a in self._batch_axes)
        produced = self.codes.of(Sharding.of(enters))
        index = self._shared_node(scope, graph, tensor, np.array([produced]), readers, 1)
        if tensor.differentiable:
            node = self.ledger.nodes[index]
            local = [
                math.prod(self.codes.sharding(c).local_shape(tensor.shape, self.mesh))
                for c in node.results[tensor.name].tolist()
            ]
            each = DTYPE_BYTES[tensor.dtype] * self.calls[scope]
            node.kept_again = np.array(local, np.int64) * each

    def _shared_node(
        self,
        scope: Scope,
        graph: Graph,
        tensor: Tensor,
        produced: Ints,
        readers: Readers,
        calls: int,
    ) -> int:
        """The copy that several readers share: any sharding that its producer or a reader uses."""
        codes = [produced, np.zeros(1, np.int64)]
        for op, position in readers[tensor.name]:
            if op.kind == "block":
                block = self.graph.blocks[op.attrs["block"]]
                entry, inner = self.source[block.name, block.body.inputs[position]]
                codes.append(self.ledger.nodes[entry].results[inner])
            else:
                codes.append(self.tables.of(scope, graph, op).wants[position])
        data = self.codes.batch_part(produced[:1])
        ordered = in_order(self.codes, self.codes.model_part(np.concatenate(codes)) + data)
        none = np.zeros(len(ordered), np.int64)
        shared = [self.codes.sharding(c) for c in ordered.tolist()]
        node = Node(key(scope, tensor.name), "shared", shared, none, none, none, calls)
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
            handed = key(scope, name) in self.fusion.handed
            layers, grad = self.tables.neighbours(scope, graph, name), tensor.differentiable
            self.ledger.edge((index, name), shared, tensor, wants, calls, grad, handed, layers)
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
            if (block.name, inner) in self.fixed:
                continue  # a buffer that is whole here and there
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
        """The loss is whole on the model axes, a share of the sum on each data rank. What is
        returned beside it has no gradient."""
        tensor = graph.tensors[name]
        index, inner = self.source[None, name]
        gives = self.ledger.nodes[index].results[inner]
        wants = self.codes.batch_part(gives)
        node = self.ledger.nodes[index]
        grad = tensor.differentiable and name == graph.outputs[0]
        self.ledger.leave(node, tensor, gives, wants, grad)
