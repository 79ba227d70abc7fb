"""What a loss function asks for that a plan decides instead: sentences for the plan's reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax.extend.core as jex

from autopar.frontends.jax.own_casts import OwnCasts
from autopar.frontends.jax.places import UNKNOWN, place_of
from autopar.frontends.jax.time_scans import REMATERIALISED, is_again
from autopar.nouns.errors import first_of
from autopar.nouns.graph import Graph
from autopar.nouns.kinds import AGAIN

NAMED = 4
"""How many places stand in a sentence before "and N more"."""


def remarks(closed: Any, precision: str, casts: OwnCasts, graph: Graph) -> tuple[str, ...]:
    """Sentences on the jaxpr ``closed`` of a loss, of which ``graph`` was made; ``precision`` is
    that of the workload."""
    notes = [*_recomputed(closed.jaxpr, _run_again(graph)), *_constrained(closed.jaxpr)]
    return (*notes, *([_lost(precision, casts.lost)] if casts.lost else ()))


def untrained_note(names: Sequence[str]) -> tuple[str, ...]:
    """What is told of parameters that the loss gives no gradient; nothing where there are none."""
    if not names:
        return ()
    return (
        f"The loss gives {len(names)} parameter{'s' if names[1:] else ''} no gradient (unread, or "
        f"under stop_gradient), so zeros, with which the optimizer steps as on one device: "
        f"{first_of(names, NAMED)}. In a script frozen=... spares them state and steps.",
    )


def _run_again(graph: Graph) -> set[str]:
    """Where scans stand whose steps the program runs again in backward, as the loss has it."""
    parts = (graph, *(block.body for block in graph.blocks.values()))
    ops = (op for part in parts for op in part.ops if op.attrs.get(AGAIN))
    return {f"{op.source.file.rpartition('/')[2]}:{op.source.line}" for op in ops}


def _recomputed(jaxpr: Any, again: Collection[str]) -> Iterator[str]:
    by_policy: dict[str, list[str]] = {}
    kept: set[int] = set()
    for eqn in _equations(jaxpr):
        if eqn.primitive.name == "scan" and place_of(eqn) in again and is_again(eqn):
            kept.add(id(eqn.params["jaxpr"].jaxpr.eqns[0]))
        if id(eqn) in kept:
            continue
        if eqn.primitive.name in REMATERIALISED:
            by_policy.setdefault(_policy(eqn.params.get("policy")), []).append(_place(eqn))
    for policy, places in by_policy.items():
        how = f" with policy {policy}" if policy else ""
        yield (
            f"The plan decides what backward computes again: jax.checkpoint{how} at "
            f"{first_of(places, NAMED)} is left out. "
            "--fix recompute=none, compute or full asks for one."
        )


def _place(eqn: Any) -> str:
    """Where ``eqn`` is called, or where JAX calls it itself, as `jax.lax.scan` its body, the first
    place inside of it."""
    every = (eqn, *_equations(eqn.params["jaxpr"]))
    return next((place for each in every if (place := place_of(each)) != UNKNOWN), UNKNOWN)


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
            "The plan decides every sharding: with_sharding_constraint at "
            f"{first_of(places, NAMED)} is left out."
        )


def _lost(precision: str, places: Sequence[str]) -> str:
    return (
        f"With precision {precision} the program computes in {precision} what the loss casts to "
        f"float32 itself, at {first_of(places, NAMED)}: there the loss is not the program that it "
        "is for float32, so that its casts cannot be followed. To keep them, cast parameters and "
        "batch in the loss and plan with precision float32."
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, jex.ClosedJaxpr):
                    yield from _equations(item.jaxpr)
                elif isinstance(item, jex.Jaxpr):
                    yield from _equations(item)
