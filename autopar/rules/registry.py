"""Which rule an op kind follows. ``register`` is also what users call for their own ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from autopar.nouns.errors import UserError
from autopar.nouns.graph import Op, Tensor
from autopar.nouns.kinds import (
    BODIES,
    CARRIED,
    FLOPS,
    KEEPS,
    OWN_DERIVATIVE,
    PRODUCTS,
    SCAN,
    UNGRADED,
)
from autopar.rules.advice import no_rule
from autopar.rules.binding import bind_rule
from autopar.rules.called import given_rule, is_called
from autopar.rules.kept import Kept
from autopar.rules.kept_whole import MARK, whole_rule
from autopar.rules.notation import BoundRule, Rule, RuleError, RuleMaker
from autopar.rules.own_functions import FUNCTION, as_differentiated, known_rule
from autopar.rules.rule_text import FACTOR, parse_rule
from autopar.rules.table import TABLE
from autopar.rules.torch_calls import POINTWISE, pointwise_rule

_REGISTERED: dict[str, Rule | RuleMaker] = {}


class UnruledOp(UserError, LookupError):
    """No rule is known for an op; the plan names it."""


def register(kind: str, rule: str | Rule | RuleMaker) -> None:
    """Registers a rule for an op kind, e.g. ``register("mylib::scale", "b s d, d -> b s d")``.

    A callable gets the op with its operand and result tensors, for kinds whose rule depends on
    shapes or attrs (views, slices). A plain string saves all operands for backward and counts two
    operations a point where it sums, else one. A rule for a built-in kind takes its place. Raises
    `RuleError` where the text cannot be read.
    """
    if not isinstance(kind, str) or not kind:
        raise RuleError(
            f"register_rule({kind!r}, ...): the op comes first, by its name: 'mylib::scale'"
        )
    if not isinstance(rule, str | Rule) and not callable(rule):
        raise RuleError(
            f"register_rule({kind!r}, {rule!r}): give the rule as text, such as 'b s d, d -> b s d'"
        )
    if isinstance(rule, str):
        rule = _from_text(rule)
    elif isinstance(rule, Rule):
        _read(rule.text)
    _REGISTERED[kind] = rule
    _bound.cache_clear()


def unregister(kind: str) -> None:
    """Takes a registered rule back; a built-in one holds again where there is one."""
    _REGISTERED.pop(kind, None)
    _bound.cache_clear()


def registered_kinds() -> tuple[str, ...]:
    """Every kind whose rule came by `register`, in alphabetical order."""
    return tuple(sorted(_REGISTERED))


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """An op between its tensors; equal to one of the very same objects."""

    op: Op
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self._ids() == other._ids()

    def __hash__(self) -> int:
        return hash(self._ids())

    def _ids(self) -> tuple[int, ...]:
        return tuple(map(id, (self.op, *self.operands, *self.results)))


def _place(op: Op, tensors: Mapping[str, Tensor]) -> _Place:
    return _Place(
        op, tuple([tensors[n] for n in op.inputs]), tuple([tensors[n] for n in op.outputs])
    )


def rule_for(op: Op, tensors: Mapping[str, Tensor]) -> Rule:
    """The rule of ``op``; raises `UnruledOp` naming its kind and source."""
    return _rule_at(_place(op, tensors))


def _rule_at(place: _Place) -> Rule:
    op, operands, results = place.op, place.operands, place.results
    rule = _rule(op, operands, results)
    if rule is None:
        raise UnruledOp(no_rule(op, operands, results))
    return as_differentiated(rule, op)


def _rule(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule | None:
    if op.attrs.get(MARK):
        return whole_rule(operands, results)
    rule = _REGISTERED.get(op.kind)
    if rule is None and FUNCTION in op.attrs:
        return known_rule(op)
    rule = rule or TABLE.get(op.kind)
    inside = op.kind.startswith(OWN_DERIVATIVE) or BODIES in op.attrs
    if rule is None and inside and "rule" in op.attrs:
        return own_rule(op)
    if rule is None and is_called(op):
        return given_rule(op)
    if rule is None and op.attrs.get(POINTWISE):
        return pointwise_rule(len(operands), len(results))
    return rule if rule is None or isinstance(rule, Rule) else rule(op, operands, results)


def own_rule(op: Op) -> Rule:
    """Of a function with a derivative of its own, or an op with bodies; see
    `autopar.rules.composite`."""
    text = op.attrs["rule"]
    saves, ungraded = tuple(range(len(op.inputs))), op.attrs.get(UNGRADED, ())
    if op.kind == SCAN:
        return Rule(
            text,
            saves=tuple(i for i in saves if i not in op.attrs[CARRIED]),
            keeps=tuple(Kept(names, count) for count, names in op.attrs[KEEPS]),
            flop_terms=op.attrs[FLOPS],
            backward=2.0,
            cost="matmul" if op.attrs[PRODUCTS] else "elementwise",
            ungraded=ungraded,
        )
    return Rule(text, saves=saves, flops=4.0, backward=2.0, ungraded=ungraded)


def bind(op: Op, tensors: Mapping[str, Tensor]) -> BoundRule:
    """The rule of ``op`` fitted to its shapes; raises `UnruledOp` or `RuleError`."""
    return _bound(_place(op, tensors))


@lru_cache(maxsize=4096)
def _bound(place: _Place) -> BoundRule:
    """A graph is gone through again and again; what it consists of does not change."""
    op, rule = place.op, _rule_at(place)
    try:
        return bind_rule(rule, [t.shape for t in place.operands], [t.shape for t in place.results])
    except RuleError as error:
        raise RuleError(f"op {op.kind!r} at {op.source}: {error}") from None


def _from_text(text: str) -> Rule:
    operands = _read(text)
    summed = "+" in text
    return Rule(
        text,
        saves=tuple(range(len(operands))) if operands != [[]] else (),
        flops=2.0 if summed else 1.0,
        cost="matmul" if summed and len(operands) > 1 else "elementwise",
    )


def _read(text: str) -> list[list[tuple[str, ...]]]:
    """The operands of a rule; raises `RuleError` for a text that fits no shapes."""
    operands, results = parse_rule(text)
    tokens = [token for term in (*operands, *results) for dim in term for token in dim]
    marks: dict[str, str] = {}
    for factor in filter(None, map(FACTOR.fullmatch, tokens)):
        marks[factor[1]] = marks.get(factor[1], "") + factor[3]
    for name, marked in marks.items():
        if "+" in marked and "!" in marked:
            raise RuleError(f"rule {text!r}: factor {name} is marked both + and !")
    return operands
