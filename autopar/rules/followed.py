"""What was seen while the batch was followed through one scope, by the names that a plan uses."""

from __future__ import annotations

from autopar.nouns.graph import Tensor
from autopar.nouns.plan import key
from autopar.nouns.sharding import WHOLE, Placement
from autopar.rules.following import Scope, dim_of
from autopar.rules.strategies import NOTHING


def named_choices(scope: Scope) -> dict[str, str]:
    """How every op splits the batch, and how the inputs of a block come, by full name."""
    named = {
        key(scope.name, op.name): scope.choices.get(op.name, NOTHING)
        for op in scope.graph.ops
        if op.kind != "block"
    }
    if scope.name is not None:
        for name in scope.graph.inputs:
            text = str(_placement(scope, name))
            named[key(scope.name, name)] = "" if text == "R" else text
    return named


def named_apart(scope: Scope) -> list[str]:
    """Tensors whose pieces do not lie one behind the other."""
    return [key(scope.name, name) for name, places in scope.behind.items() if places > 1]


def named_states(scope: Scope) -> dict[str, str]:
    """The placement of every tensor on the data axes, as text."""
    return {key(scope.name, name): str(_placement(scope, name)) for name in scope.graph.tensors}


def _placement(scope: Scope, name: str) -> Placement:
    state = scope.states.get(name)
    return _free(scope.graph.tensors[name]) if state is None else state


def all_obstacles(scope: Scope) -> list[str]:
    """Reasons of ops, and free tensors of which each microbatch would need its own part."""
    obstacles = list(scope.obstacles.values())
    for op in scope.graph.ops:
        if op.kind == "block":
            continue
        for i, name in enumerate(op.inputs):
            held = scope.bound_rule(op).operand_holder(i, scope.choices.get(op.name, NOTHING))
            if held is not None and dim_of(scope.states.get(name)) is None:
                obstacles.append(
                    f"op {op.kind!r} at {op.source} takes a piece of {name}, which has the "
                    "size of the batch but does not come from it"
                )
    return obstacles


def _free(tensor: Tensor) -> Placement:
    return Placement("D") if tensor.differentiable else WHOLE
