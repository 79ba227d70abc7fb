"""Rules of primitives from the compiler: Shardy's pass ``sdy-populate-op-sharding-rules``.

The pass writes at every op of a StableHLO module which dims of operands and results have one factor
in common, and which factors want communication: those that are summed, shifted (``permutation``) or
wanted whole (``need_replication``). A primitive is lowered to a few such ops; dims that any of them
pairs are one index, as in `autopar.rules.composite`. An index that all of them pass through may be
split, any other is whole.

The text of the pass is that of `READ`; where it is another one, or the pass is not there, no rule
is known (`tests/jax/test_shardy.py` says then what moved).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

READ = "0.10"
"""The versions of jax whose text was read."""
PASS = "sdy-populate-op-sharding-rules"
RULE = "sdy.sharding_rule"
FREE = frozenset(("stablehlo.return", "func.return", "func.func", "builtin.module"))
BY_PLACE = {"stablehlo.scatter": 2, "stablehlo.dynamic_update_slice": 1}
"""Ops whose partitioner moves the places that they are given: a dim that they look into counts as
passed through. Which operand does not have it."""

_RULE = re.compile(
    r"<\((?P<left>.*?)\)->\((?P<right>.*?)\)\s*(?:\{(?P<sizes>[^}]*)\})?(?P<rest>.*)>"
)
_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_FLAGGED = re.compile(r"(\w+)=\{([^}]*)\}")


class NotRead(ValueError):
    """A text of the pass that has another form than the one that was read."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """What the pass says of one op: the factors of every dim, their extents, those that do not pass
    through, and of these the ones that are summed."""

    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    sizes: dict[str, int]
    flagged: frozenset[str]
    summed: frozenset[str]


def parsed(text: str) -> OpRule:
    """``#sdy.op_sharding_rule<([i, j], [j])->([i]) {i=8, j=4} reduction={j}>``.

    Raises `NotRead`.
    """
    match = _RULE.search(text)
    if match is None:
        raise NotRead(text)

    def terms(side: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
        inside = re.findall(r"\[([^\]]*)\]", side)
        return tuple(
            tuple(tuple(_FACTOR.findall(dim)) for dim in term.split(",") if dim.strip())
            for term in inside
        )

    sizes = dict(re.findall(r"([a-z](?:_\d+)?)=(\d+)", match["sizes"] or ""))
    flags = {name: _FACTOR.findall(factors) for name, factors in _FLAGGED.findall(match["rest"])}
    return OpRule(
        terms(match["left"]),
        terms(match["right"]),
        {name: int(n) for name, n in sizes.items()},
        frozenset(f for factors in flags.values() for f in factors),
        frozenset(flags.get("reduction", ())),
    )


def rule_of(function: Callable[..., Any], shapes: Sequence[Any], sums: bool = False) -> str:
    """The rule of ``function`` on operands of ``shapes``, in our notation; empty where no dim may
    be split, or the pass is not there.

    sums: what the last scatter adds up is a sum over its updates, nothing else: that may be split,
          and leaves partial sums.
    """
    module = _with_rules(function, shapes)
    if module is None:
        return ""
    try:
        return _Finder(sums).text(module)
    except NotRead:
        return ""


def _with_rules(function: Callable[..., Any], shapes: Sequence[Any]) -> Any:
    """The module of ``function`` with the rules in it; None without the pass."""
    try:
        from jaxlib.mlir import passmanager
    except ImportError:
        return None
    module = jax.jit(function, keep_unused=True).lower(*shapes).compiler_ir("stablehlo")
    with module.context:
        try:
            manager = passmanager.PassManager.parse(f"builtin.module(func.func({PASS}))")
        except ValueError:
            return None
        manager.run(module.operation)
    return module


Place = tuple[Any, int]
"""(value of the module, dim)"""


@dataclass(slots=True)
class _Finder:
    """Unites the places that ops pair; ``kept`` are whole, ``summed`` of a scatter that may be."""

    sums: bool
    parent: dict[Place, Place] = field(default_factory=dict)
    kept: list[Place] = field(default_factory=list)
    summed: list[Place] = field(default_factory=list)

    def text(self, module: Any) -> str:
        functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
        for function in functions.values():
            self._region(function.operation, functions)
        main = functions["main"].operation.regions[0].blocks[0]
        returned = list(main.operations)[-1].operands
        operands, results = [list(map(_shaped, some)) for some in (main.arguments, returned)]
        return self._written(operands, results)

    # -- ops -------------------------------------------------------------------------------------

    def _region(self, op: Any, functions: dict[str, Any]) -> None:
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    self._op(inner.operation, functions)
                    self._region(inner.operation, functions)

    def _op(self, op: Any, functions: dict[str, Any]) -> None:
        name = op.name
        if RULE in op.attributes:
            self._ruled(op, parsed(str(op.attributes[RULE])))
        elif name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
            self._branches(op)
        elif name == "func.call":
            called = functions[op.attributes["callee"].value].operation.regions[0].blocks[0]
            self._tie(op.operands, called.arguments)
            self._tie(op.results, list(called.operations)[-1].operands)
        elif name == "stablehlo.iota":
            self._keep(op.results[0], [op.attributes["iota_dimension"].value])
        elif name == "stablehlo.constant":
            if not op.attributes["value"].is_splat:
                self._keep(op.results[0])
        elif name not in FREE:
            for value in (*op.operands, *op.results):
                self._keep(value)

    def _ruled(self, op: Any, rule: OpRule) -> None:
        if (len(rule.operands), len(rule.results)) != (len(op.operands), len(op.results)):
            raise NotRead(str(op.attributes[RULE]))
        seen = list(_places([*op.operands, *op.results], [*rule.operands, *rule.results]))
        kept = set(rule.flagged)
        kept.update(f for _, size, factors in seen for f in factors if rule.sizes[f] != size)
        lacking = BY_PLACE.get(op.name)
        if lacking is not None:
            has = {f for dim in rule.operands[lacking] for f in dim}
            kept.update(f for dim in rule.operands[0] for f in dim if f not in has)
        by_factor: dict[str, list[Place]] = {}
        for place, _, factors in seen:
            for factor in factors:
                by_factor.setdefault(factor, []).append(place)
        for factor, places in by_factor.items():
            self._join(places)
            if self.sums and op.name == "stablehlo.scatter" and factor in rule.summed:
                self.summed += places
            elif factor in kept:
                self.kept += places

    def _branches(self, op: Any) -> None:
        """Loops and branches: what goes in at a place comes out there, whatever runs."""
        blocks = [region.blocks[0] for region in op.regions]
        if op.name == "stablehlo.while":
            for block in blocks:
                self._tie(op.operands, block.arguments)
            self._tie(op.operands, op.results)
            blocks = blocks[1:]  # the first says whether it goes on
        for block in blocks:
            self._tie(op.results, list(block.operations)[-1].operands)

    # -- places ----------------------------------------------------------------------------------

    def _root(self, place: Place) -> Place:
        self.parent.setdefault(place, place)
        while self.parent[place] != place:
            place = self.parent[place]
        return place

    def _join(self, places: Sequence[Place]) -> None:
        for other in places[1:]:
            self.parent[self._root(other)] = self._root(places[0])

    def _tie(self, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
        for a, b in zip(ours, theirs, strict=True):
            for d in range(len(_shaped(a)[1])):
                self._join([(a, d), (b, d)])

    def _keep(self, value: Any, dims: Sequence[int] | None = None) -> None:
        every = range(len(_shaped(value)[1]))
        self.kept += [(value, d) for d in (every if dims is None else dims)]

    # -- the rule --------------------------------------------------------------------------------

    def _written(self, operands: Sequence[Any], results: Sequence[Any]) -> str:
        roots = {
            side: [[self._root((value, d)) for d in range(len(shape))] for value, shape in some]
            for side, some in (("in", operands), ("out", results))
        }
        whole = {self._root(p) for p in self.kept}
        terms = [*roots["in"], *roots["out"]]
        whole.update(r for term in terms for r in term if term.count(r) > 1)
        given = {r for term in roots["in"] for r in term}
        everywhere = set.intersection(*map(set, roots["out"])) if results else set()
        summed = {self._root(p) for p in self.summed} - whole
        summed = {r for r in summed if not any(r in term for term in roots["out"])}
        free = (given & everywhere - whole) | (summed & given)
        names: dict[tuple[Place, int], str] = {}

        def word(root: Place, size: int) -> str:
            if size == 1:
                return "1"
            name = names.setdefault((root, size), f"i{len(names)}")
            return name if root in free - summed else f"{name}+" if root in free else f"{name}!"

        def side(some: Sequence[Any], rows: Sequence[Sequence[Place]]) -> str:
            return ", ".join(
                " ".join(word(r, n) for r, n in zip(row, shape, strict=True))
                for (_, shape), row in zip(some, rows, strict=True)
            )

        text = f"{side(operands, roots['in'])} -> {side(results, roots['out'])}"
        words = text.replace(",", " ").replace("->", " ").split()
        split = any(word != "1" and not word.endswith("!") for word in words)
        return text if split else ""


def _places(values: Sequence[Any], terms: Sequence[Any]) -> Iterator[tuple[Place, int, Any]]:
    """(place, extent, factors) of every dim with factors."""
    for value, term in zip(values, terms, strict=True):
        name, shape = _shaped(value)
        if len(shape) != len(term):
            raise NotRead(f"{term} for {shape}")
        for d, (size, factors) in enumerate(zip(shape, term, strict=True)):
            if factors:
                yield (name, d), size, factors


def _shaped(value: Any) -> tuple[Any, tuple[int, ...]]:
    """A value and its extents; nothing for what is no tensor."""
    shape = getattr(value.type, "shape", None)
    return value, tuple(shape) if shape is not None else ()
