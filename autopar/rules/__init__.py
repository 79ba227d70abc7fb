"""What may be split: one rule per op kind, and everything that follows from it."""

from autopar.rules.notation import BoundRule, Factor, Internal, Rule
from autopar.rules.registry import UnruledOp, bind, register, rule_for
from autopar.rules.resharding import Collective, Step, reshard, transition
from autopar.rules.strategies import Strategy, choices, shardings, strategies

__all__ = [
    "BoundRule",
    "Collective",
    "Factor",
    "Internal",
    "Rule",
    "Step",
    "Strategy",
    "UnruledOp",
    "bind",
    "choices",
    "register",
    "reshard",
    "rule_for",
    "shardings",
    "strategies",
    "transition",
]
