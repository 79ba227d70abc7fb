"""What a loss function asks for that a plan decides instead: sentences for the plan's reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex

from autopar.frontends.jax.places import frames_of, place_of

REMATERIALISED = frozenset(("remat", "remat2", "checkpoint"))
CASTS = frozenset(("astype", "_astype", "convert_element_type", "asarray", "array"))
"""Functions of JAX by which a user casts; others cast inside, for their own precision."""
HALF = ("bfloat16", "float16")
NAMED = 4
"""How many places stand in a sentence before "and N more"."""


def remarks(
    loss: Callable[..., Any], closed: Any, params: Any, batch: Any, precision: str
) -> tuple[str, ...]:
    """Sentences on the jaxpr ``closed`` of ``loss``; ``precision`` is that of the workload."""
    found = [*_recomputed(closed.jaxpr), *_constrained(closed.jaxpr)]
    if precision in HALF:
        found += _casts(loss, closed, params, batch, precision)
    return tuple(found)


def _recomputed(jaxpr: Any) -> Iterator[str]:
    by_policy: dict[str, list[str]] = {}
    for eqn in _equations(jaxpr):
        if eqn.primitive.name in REMATERIALISED:
            by_policy.setdefault(_policy(eqn.params.get("policy")), []).append(place_of(eqn))
    for policy, places in by_policy.items():
        how = f" with policy {policy}" if policy else ""
        yield (
            f"The plan decides what backward computes again: jax.checkpoint{how} at "
            f"{_listed(places)} is left out. --fix recompute=none, compute or full asks for one."
        )


def _policy(policy: Any) -> str:
    """``save_only_these_names``, from the function or record that JAX makes of it; "" for none."""
    if policy is None:
        return ""
    name = getattr(policy, "__qualname__", None)
    return name.partition(".<locals>")[0] if name else str(policy)


def _constrained(jaxpr: Any) -> Iterator[str]:
    places = [
        f"{place_of(eqn)} ({getattr(eqn.params.get('sharding'), 'spec', '?')})"
        for eqn in _equations(jaxpr)
        if eqn.primitive.name == "sharding_constraint"
    ]
    if places:
        yield (
            f"The plan decides every sharding: with_sharding_constraint at {_listed(places)} is "
            "left out."
        )


def _casts(
    loss: Callable[..., Any], closed: Any, params: Any, batch: Any, precision: str
) -> list[str]:
    """Casts to float32 that only the function in ``precision`` has."""

    def low(leaf: Any) -> Any:
        dtype = precision if str(leaf.dtype) == "float32" else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    try:
        narrow = jax.make_jaxpr(loss)(jax.tree.map(low, params), jax.tree.map(low, batch))
    except Exception:  # a user's function may well insist on its own dtypes
        return []
    known = set(_cast_places(closed.jaxpr, precision))
    places = [p for p in _cast_places(narrow.jaxpr, precision) if p not in known]
    if not places:
        return []
    return [
        f"With precision {precision} the program computes in {precision} what the loss casts to "
        f"float32 itself, at {_listed(places)}. To keep its casts, cast parameters and batch in "
        "the loss and plan with precision float32."
    ]


def _cast_places(jaxpr: Any, precision: str) -> Iterator[str]:
    for eqn in _equations(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        narrow = str(eqn.invars[0].aval.dtype) == precision
        if narrow and str(eqn.outvars[0].aval.dtype) == "float32":
            _, caller = frames_of(eqn)
            if caller.rpartition(".")[2] in CASTS:
                yield place_of(eqn)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, jex.ClosedJaxpr):
                    yield from _equations(item.jaxpr)
                elif isinstance(item, jex.Jaxpr):
                    yield from _equations(item)


def _listed(places: list[str]) -> str:
    each = list(dict.fromkeys(places))
    more = f" and {len(each) - NAMED} more" if len(each) > NAMED else ""
    return ", ".join(each[:NAMED]) + more
