"""Which rule an op kind follows. ``register`` is also what users call for their own ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import BoundRule, Rule, bind_rule

RuleMaker = Callable[[Op, tuple[Tensor, ...], tuple[Tensor, ...]], Rule]

_RULES: dict[str, Rule | RuleMaker] = {}


class UnruledOp(LookupError):
    """No rule is known for an op; the plan names it."""


def register(kind: str, rule: str | Rule | RuleMaker) -> None:
    """Registers a rule for an op kind, e.g. ``register("mylib::scale", "b s d, d -> b s d")``.

    A callable gets the op with its operand and result tensors, for kinds whose rule depends on
    shapes or attrs (views, slices). A plain string saves all operands for backward.
    """
    if isinstance(rule, str):
        terms = rule.partition("->")[0].count(",") + 1
        rule = Rule(rule, saves=tuple(range(terms)))
    _RULES[kind] = rule


def known_kinds() -> tuple[str, ...]:
    _load()
    return tuple(sorted(_RULES))


def rule_for(op: Op, tensors: Mapping[str, Tensor]) -> Rule:
    """The rule of ``op``; raises `UnruledOp` naming its kind and source."""
    _load()
    found = _RULES.get(op.kind)
    if found is None:
        raise UnruledOp(f"no rule for op {op.kind!r} at {op.source}")
    if isinstance(found, Rule):
        return found
    return found(
        op, tuple(tensors[n] for n in op.inputs), tuple(tensors[n] for n in op.outputs)
    )


def bind(op: Op, tensors: Mapping[str, Tensor]) -> BoundRule:
    """The rule of ``op`` fitted to its shapes."""
    return bind_rule(
        rule_for(op, tensors),
        [tensors[n].shape for n in op.inputs],
        [tensors[n].shape for n in op.outputs],
    )


def _load() -> None:
    from autopar.rules import table  # noqa: F401  (fills _RULES; late, so that table can import us)
