"""Casts that a loss asks for itself, which a half precision would take away.

The graph of a loss is that of float32 parameters, where ``x.astype(jnp.float32)`` does nothing and
leaves no trace. The loss traced for parameters and batch in half precision has it, and the cast
back; where both traces are one program up to casts, `own_casts` says between which equations.
Casts that functions of JAX make inside for their own precision are not the user's: the program
calls these functions, and they do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex

from autopar.frontends.jax.counts import OtherCounts
from autopar.frontends.jax.derivatives import CUSTOM
from autopar.frontends.jax.places import frames_of, place_of
from autopar.frontends.jax.precision import inner_jaxprs

CASTS = frozenset(("astype", "_astype", "convert_element_type", "asarray", "array"))
"""Functions of JAX by which a user casts; others cast inside, for their own precision."""
HALF = ("bfloat16", "float16")

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OwnCasts:
    """at: (``id`` of an equation, operand) or (``id`` of a jaxpr, result) -> the dtypes that the
    value is cast to before it is read there.
    lost: places in the user's code of casts to float32 that are in none of these.
    half:  the precision of the workload where it is a half one.
    carried: by ``id`` of the equation of a scan the dtypes of what it carries in that.
    """

    at: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    half: str = ""
    carried: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def of_carries(self, scan: Any) -> tuple[str, ...]:
        """The dtypes of what a scan carries, from step to step the same; nothing where they are
        those that it has anyway. Where the loss is another program in half precision they are not
        known: as wide as can be."""
        count = scan.params["num_carry"] if self.half else 0
        return self.carried.get(id(scan), ("float32",) * count)


class _Other(Exception):
    """The traces are not one program up to casts."""


def in_half(
    loss: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Any],
    precision: str,
    counts: Collection[str] = (),
) -> Any:
    """The jaxpr of ``loss`` for parameters and batch in ``precision``, but for the entries of
    ``counts``; None where that is no half precision, or the loss cannot be traced in it. Raises
    `OtherCounts`."""
    if precision not in HALF:
        return None

    def low(leaf: Any) -> Any:
        dtype = precision if str(leaf.dtype) == "float32" else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    try:
        given = {n: v if n in counts else jax.tree.map(low, v) for n, v in batch.items()}
        return jax.make_jaxpr(loss)(jax.tree.map(low, params), given)
    except OtherCounts:
        raise
    except Exception:  # a user's function may well insist on its own dtypes
        return None


def own_casts(closed: Any, narrow: Any, precision: str) -> OwnCasts:
    """The casts of a loss in ``precision`` that its jaxpr ``closed`` for float32 lacks; ``narrow``:
    as `in_half`."""
    half = precision if precision in HALF else ""
    if narrow is None:
        return OwnCasts(half=half)
    casts = _Walk(precision)
    try:
        casts.bodies(closed.jaxpr, narrow.jaxpr)
        at, kept, carried = casts.at, casts.kept, casts.carried
    except _Other:
        at, kept, carried = {}, set(), {}
    known = {place for place, _ in _user_casts(closed.jaxpr)} | kept
    lost = [
        place
        for place, dtypes in _user_casts(narrow.jaxpr)
        if dtypes == (precision, "float32") and place not in known
    ]
    some = {key: dtypes for key, dtypes in at.items() if dtypes}
    return OwnCasts(some, tuple(lost), half, carried)


class _Walk:
    """Walks two jaxprs side by side. ``kept``: the places of the casts that `at` has."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.at: dict[Place, tuple[str, ...]] = {}
        self.kept: set[str] = set()
        self.carried: dict[int, tuple[str, ...]] = {}

    def bodies(self, wide: Any, narrow: Any) -> None:
        left, right = ([e for e in j.eqns if not _is_cast(e)] for j in (wide, narrow))
        if [e.primitive for e in left] != [e.primitive for e in right]:
            raise _Other
        chains = self._chains(narrow)
        for x, y in zip(left, right, strict=True):
            self._note(id(x), y.invars, chains)
            if x.primitive.name == "scan":
                fixed, count = y.params["num_consts"], y.params["num_carry"]
                given = y.params["jaxpr"].jaxpr.invars[fixed : fixed + count]
                self.carried[id(x)] = tuple(str(v.aval.dtype) for v in given)
            if x.primitive.name in CUSTOM:
                continue  # one op with its own derivative
            for p, q in zip(inner_jaxprs(x), inner_jaxprs(y), strict=True):
                self.bodies(p, q)
        self._note(id(wide), narrow.outvars, chains)

    def _note(self, reader: int, atoms: Any, chains: Mapping[Any, list[Any]]) -> None:
        for place, atom in enumerate(atoms):
            casts = [] if isinstance(atom, jex.Literal) else chains.get(atom, [])
            dtypes = tuple(str(e.outvars[0].aval.dtype) for e in casts)
            if self.at.setdefault((reader, place), dtypes) != dtypes:
                raise _Other  # a function that is called with one dtype here and another there
            self.kept.update(map(place_of, casts))

    def _chains(self, jaxpr: Any) -> dict[Any, list[Any]]:
        """For each result of a cast the user's own casts that lead to it."""
        chains: dict[Any, list[Any]] = {}
        for eqn in filter(_is_cast, jaxpr.eqns):
            source = eqn.invars[0]
            before = [] if isinstance(source, jex.Literal) else chains.get(source, [])
            dtypes = _dtypes(eqn)
            own = _is_users(eqn) and set(dtypes) == {"float32", self.precision}
            if own and before and _dtypes(before[-1]) == (self.precision, "float32"):
                chains[eqn.outvars[0]] = before[:-1]  # there and back
            else:
                chains[eqn.outvars[0]] = [*before, eqn] if own else before
        return chains


def _is_cast(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "convert_element_type")


def _dtypes(eqn: Any) -> tuple[str, str]:
    return str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype)


def _is_users(eqn: Any) -> bool:
    _, called = frames_of(eqn)
    return called.rpartition(".")[2] in CASTS


def _user_casts(jaxpr: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    for eqn in jaxpr.eqns:
        if _is_cast(eqn) and _is_users(eqn):
            yield place_of(eqn), _dtypes(eqn)
        for inner in inner_jaxprs(eqn):
            yield from _user_casts(inner)
