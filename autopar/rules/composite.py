"""The rule of an op that is made of ops: a function with a derivative of its own.

Such an op has two graphs. ``forward`` maps operands to results; ``backward`` maps operands and the
results' gradients to the operands' gradients. A dim of an operand may be split where every op of
both graphs treats it as parallel: it is followed from op to op, and all dims that ops pair are one
index. What any op keeps whole, cuts, or reads the place of is whole.

Where ``backward`` is not linear in the gradients that come in (it clips, rounds or squares them),
they must be whole: see `Rule.defers`.

A branch or a loop has the graphs of its bodies instead: dims that go in at a place are those that
come out there, in whatever body runs. Nothing may be summed in one, so whatever says which one
runs, or how often, is the same on all ranks. A scan is a loop whose body has a row of stacked
operands: their first dim is time, which is whole where one step carries something to the next.

In ``backward`` an index may also be summed, if the sum is the gradient that is returned: that of an
operand without the index, whose parts on all ranks add up. A gradient of such an operand that is
not that sum would be counted once a rank, so the index is whole then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import CARRIED, SCAN, STACKED, UNGRADED
from autopar.rules.notation import BoundRule, Rule
from autopar.rules.registry import bind

SUMS = frozenset(("sum", "einsum", "linear", "linear_t", "matmul"))
PASSING = frozenset(("reshape", "transpose", "cast", "neg", "identity"))
FROM_NOTHING = frozenset(("full",))
"""Ops without operands whose values do not depend on the place."""
BILINEAR = frozenset(("mul", "matmul", "linear", "linear_t", "einsum"))
"""Linear in each operand, for fixed values of the others."""
LINEAR_AT = {"jax::triangular_solve": 1, "index_select": 0}
"""Linear in this operand, whatever rule they have: those of a solve's derivative."""

Place = tuple[str, str, int]
"""(graph, tensor, dim)"""


@dataclass(frozen=True, slots=True)
class Indices:
    """The indices of a composite op: one for all dims that its ops pair.

    of:    the index of a dim of a tensor of ``forward`` or ``backward``.
    whole: those that no axis may split.
    rule:  the op's own, its factors named as the indices are.
    """

    of: Mapping[Place, str]
    whole: frozenset[str]
    rule: Rule

    @property
    def splits(self) -> bool:
        """Whether any axis could split the op, or there is nothing to split."""
        left, _, right = self.rule.text.partition("->")
        return "!" not in left + right or any(
            word not in ("1", "!") and not word.endswith("!")
            for word in (left + right).replace(",", " ").split()
        )


def indices_of(forward: Graph, backward: Graph, gradients: Sequence[int]) -> Indices:
    """The indices of a composite op. ``gradients``: for each output of ``backward`` the position of
    the operand whose gradient it is. Raises `UnruledOp` for an op in it without a rule."""
    finder = _Finder({"forward": forward, "backward": backward}, gradients)
    return finder.indices(finder.of_a_derivative, backward)


def own_names(op: Op) -> tuple[str, ...]:
    """What operands and results of an op with bodies are called among its `Indices`."""
    operands = (f"x{i}" for i in range(len(op.inputs)))
    return (*operands, *(f"y{i}" for i in range(len(op.outputs))))


def indices_of_bodies(op: Op, tensors: Mapping[str, Tensor], bodies: Sequence[Body]) -> Indices:
    """The indices of an op with bodies, its own tensors those of the side ``forward``, those of
    body i of side ``i``. Raises `UnruledOp` for an op in a body without a rule."""
    names, count = own_names(op), len(op.inputs)
    own_tensors = {
        name: replace(tensors[given], name=name)
        for name, given in zip(names, (*op.inputs, *op.outputs), strict=True)
    }
    own = Graph(own_tensors, (), names[:count], names[count:])
    sides = {str(i): body.graph for i, body in enumerate(bodies)}
    finder = _Finder({"forward": own, **sides}, ())
    finder.ungraded = frozenset(f"y{i}" for i in op.attrs[UNGRADED])
    return finder.indices(lambda: finder.of_bodies(bodies, op), own)


@dataclass(frozen=True, slots=True)
class Body:
    """One of the graphs that an op may run. ``takes``: its inputs, by positions among the operands
    of the op; ``gives``: whether its results are those of the op, or say whether a loop goes on."""

    graph: Graph
    takes: tuple[int, ...]
    gives: bool


class _Finder:
    def __init__(self, graphs: Mapping[str, Graph], gradients: Sequence[int]) -> None:
        self.graphs = graphs
        self.gradients = tuple(gradients)
        self.ungraded: frozenset[str] = frozenset()  # results that no gradient comes back to
        self.parent: dict[Place, Place] = {}
        self.whole: set[Place] = set()
        self.summed: dict[str, list[Place]] = {}  # backward op -> what it sums
        self.clipping: list[tuple[str, Op]] = []  # in bodies: gradients need be whole, with side

    def indices(self, tie: Callable[[], None], backward: Graph) -> Indices:
        for side, graph in self.graphs.items():
            for tensor in graph.tensors.values():
                for d in range(len(tensor.shape)):
                    self.parent[side, tensor.name, d] = (side, tensor.name, d)
            for op in graph.ops:
                self._op(side, graph, op)
        tie()
        self._whole_gradients()
        self._diagonals()
        if "backward" in self.graphs:
            self._gradients_add_up()
        self._in_all_results()
        return self._named(backward)

    # -- union of places -----------------------------------------------------------------------

    def _root(self, place: Place) -> Place:
        while self.parent[place] != place:
            self.parent[place] = self.parent[self.parent[place]]
            place = self.parent[place]
        return place

    def _join(self, places: Sequence[Place]) -> None:
        for other in places[1:]:
            self.parent[self._root(other)] = self._root(places[0])

    def _keep(self, places: Sequence[Place]) -> None:
        self.whole.update(places)

    def _is_whole(self, root: Place) -> bool:
        return any(self._root(p) == root for p in self.whole)

    # -- what ops do to dims -------------------------------------------------------------------

    def _op(self, side: str, graph: Graph, op: Op) -> None:
        bound = bind(op, graph.tensors)
        if side.isdigit() and not bound.rule.defers:
            self.clipping.append((side, op))
        by_factor: dict[str, list[Place]] = {}
        joint: set[str] = set()
        for name, dim, factors in _dims(op, bound):
            place = (side, name, dim)
            for factor in factors:
                by_factor.setdefault(factor, []).append(place)
            if len(factors) != 1:
                joint.update(factors)
        from_nothing = not op.inputs and op.kind not in FROM_NOTHING
        for name, places in by_factor.items():
            kind = bound.factors[name].kind
            if kind == "whole" or name in joint or bound.rule.implemented(name) or from_nothing:
                self._keep(places)
                continue
            self._join(places)
            if kind == "summed":
                if side == "backward" and op.kind in SUMS:
                    self.summed.setdefault(op.name, []).append(places[0])
                else:
                    self._keep(places)

    def of_bodies(self, bodies: Sequence[Body], op: Op) -> None:
        own, carried = self.graphs["forward"], op.attrs.get(CARRIED, ())
        begins = zip((own.inputs[x] for x in carried), own.outputs, strict=False)
        pairs = [(("forward", x), ("forward", y)) for x, y in begins]
        rows = {own.inputs[x] for x in op.attrs.get(STACKED, ())}
        if op.kind == SCAN:
            rows.update(own.outputs[len(carried) :])
        for i, body in enumerate(bodies):
            given = zip((own.inputs[x] for x in body.takes), body.graph.inputs, strict=True)
            pairs += [(("forward", ours), (str(i), theirs)) for ours, theirs in given]
            if body.gives:
                made = zip(own.outputs, body.graph.outputs, strict=True)
                pairs += [(("forward", ours), (str(i), theirs)) for ours, theirs in made]
        for ours, theirs in pairs:
            behind = ours[1] in rows  # the dim of time, which a step does not see
            for d in range(_rank(self.graphs[theirs[0]], theirs[1])):
                self._join([(*ours, d + behind), (*theirs, d)])
        times: list[Place] = [("forward", name, 0) for name in sorted(rows)]
        if carried or not op.attrs.get(STACKED):
            self._keep(times)
        else:  # no step knows of another one
            self._join(times)

    def of_a_derivative(self) -> None:
        forward, backward = self.graphs["forward"], self.graphs["backward"]
        count = len(forward.inputs)
        pairs = list(zip(forward.inputs, backward.inputs, strict=False))
        pairs += list(zip(forward.outputs, backward.inputs[count:], strict=True))
        for ours, theirs in pairs:
            for d in range(len(forward.tensors[ours].shape)):
                self._join([("forward", ours, d), ("backward", theirs, d)])
        for made, position in zip(backward.outputs, self.gradients, strict=True):
            for d in range(len(backward.tensors[made].shape)):
                self._join([("forward", forward.inputs[position], d), ("backward", made, d)])

    def _whole_gradients(self) -> None:
        """What an op in a body that clips or rounds gradients has no place for is whole: of a
        result without the index, the gradient on one rank would be a share."""
        for side, op in self.clipping:
            graph = self.graphs[side]
            for out in op.outputs:
                roots = {self._root((side, out, d)) for d in range(_rank(graph, out))}
                for name, d in self._dims_of_op():
                    if self._root(("forward", name, d)) not in roots:
                        self._keep([("forward", name, d)])

    def _diagonals(self) -> None:
        """A tensor with one index on two dims."""
        for side, graph in self.graphs.items():
            for tensor in graph.tensors.values():
                places = [(side, tensor.name, d) for d in range(len(tensor.shape))]
                roots = [self._root(p) for p in places]
                self._keep([p for p, r in zip(places, roots, strict=True) if roots.count(r) > 1])

    def _gradients_add_up(self) -> None:
        forward, backward = self.graphs["forward"], self.graphs["backward"]
        makers = {out: op for op in backward.ops for out in op.outputs}
        readers = backward.consumers()
        used: set[str] = set()
        split = {self._root(("forward", n, d)) for n, d in self._dims_of_op()}
        for made, position in zip(backward.outputs, self.gradients, strict=True):
            operand = forward.inputs[position]
            own = {self._root(("forward", operand, d)) for d in range(_rank(forward, operand))}
            summed: set[Place] = set()
            zero = False
            name, op = made, makers.get(made)
            while op is not None and len(readers[name]) + (name in backward.outputs) == 1:
                if op.kind == "full" and op.attrs["value"] == 0:
                    zero = True
                if op.kind in SUMS:
                    used.add(op.name)
                    summed |= {self._root(p) for p in self.summed.get(op.name, ())}
                if not _passes(op):
                    break
                name = op.inputs[0]
                op = makers.get(name)
            for root in split - own - summed:
                if not zero:
                    self._keep([root])
        for name, places in self.summed.items():
            if name not in used:
                self._keep(places)

    def _dims_of_op(self) -> Iterator[tuple[str, int]]:
        forward = self.graphs["forward"]
        for name in dict.fromkeys((*forward.inputs, *forward.outputs)):
            for d in range(_rank(forward, name)):
                yield name, d

    def _in_all_results(self) -> None:
        """An operand's gradient would be a sum over ranks by one result, and whole by another."""
        forward = self.graphs["forward"]
        held = [
            {self._root(("forward", n, d)) for d in range(_rank(forward, n))}
            for n in forward.outputs
            if n not in self.ungraded
        ]
        for name, d in self._dims_of_op():
            root = self._root(("forward", name, d))
            if not all(root in roots for roots in held):
                self._keep([root])

    def _named(self, backward: Graph) -> Indices:
        forward = self.graphs["forward"]
        names: dict[Place, str] = {}
        for place in self.parent:
            root = self._root(place)
            names.setdefault(root, f"i{len(names)}")
        whole = frozenset(names[r] for r in names if self._is_whole(r))

        def term(name: str) -> str:
            words = []
            for d, size in enumerate(forward.tensors[name].shape):
                index = names[self._root(("forward", name, d))]
                words.append("1" if size == 1 else f"{index}!" if index in whole else index)
            return " ".join(words)

        left, right = (", ".join(map(term, side)) for side in (forward.inputs, forward.outputs))
        incoming = backward.inputs[len(forward.inputs) :]
        defers = not self.clipping and linear_in(backward, incoming)
        rule = Rule(f"{left} -> {right}", defers=defers)
        return Indices({p: names[self._root(p)] for p in self.parent}, whole, rule)


def linear_in(graph: Graph, inputs: Sequence[str]) -> bool:
    """Whether every output of ``graph`` is linear in ``inputs`` together; False also where its ops
    do not show it."""
    moving = set(inputs)
    for op in graph.ops:
        held = [i for i, name in enumerate(op.inputs) if name in moving]
        if not held:
            continue
        if not _linear_op(op, held, graph):
            return False
        moving.update(op.outputs)
    return True


def _linear_op(op: Op, held: Sequence[int], graph: Graph) -> bool:
    """Whether an op is linear in its operands ``held`` together."""
    if op.kind in BILINEAR:
        return len(held) == 1
    if op.kind == "div":
        return list(held) == [0] and not op.attrs.get("scalar_first")
    if op.kind in ("add", "sub"):  # of a constant it is affine
        return "other" not in op.attrs and len(held) == len(op.inputs)
    if op.kind == "where":  # ``a`` and ``b`` are numbers in an operand's place
        constants = [op.attrs[side] for side in ("a", "b") if side in op.attrs]
        return list(held) == list(range(1, len(op.inputs))) and not any(constants)
    if op.kind in LINEAR_AT:
        return list(held) == [LINEAR_AT[op.kind]]
    rule = bind(op, graph.tensors).rule
    return op.kind in PASSING or all(map(rule.carries_partial, held))


def _passes(op: Op) -> bool:
    """Whether a sum may go through on its way to being a gradient: a sum, or linear and one
    operand."""
    scaled = op.kind in ("mul", "div") and "other" in op.attrs
    scaled = scaled and not (op.kind == "div" and op.attrs.get("scalar_first"))
    return scaled or op.kind == "sum" or op.kind in PASSING


def _dims(op: Op, bound: BoundRule) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """(tensor, dim, factors) of every dim that has factors."""
    for name, term in zip(
        (*op.inputs, *op.outputs), (*bound.operands, *bound.results), strict=True
    ):
        for dim, factors in enumerate(term):
            if factors:
                yield name, dim, factors


def _rank(graph: Graph, name: str) -> int:
    return len(graph.tensors[name].shape)
