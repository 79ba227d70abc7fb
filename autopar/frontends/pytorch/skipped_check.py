"""Whether what a skipped branch computed is as before where its mask chooses no row (`skipped`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from autopar.frontends.pytorch import finite_clamps
from autopar.frontends.pytorch.hits import Hit
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.makers import Makers, plain
from autopar.frontends.pytorch.skipped import Skip, SomeRows, refused


class Walk(Protocol):
    """The walk over a trace that is checked: see `autopar.frontends.pytorch.lifter`."""

    nodes: list[Node]
    env: dict[fx.Node, Any]
    limits: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """Where entry ``number`` of dim 0 of ``base`` is not zero."""

    base: Value
    number: int


@dataclass(frozen=True, slots=True)
class Equal:
    """Where ``base`` is ``number``: a bin that is counted (`binned`)."""

    base: Value
    number: int


Asked = Value | Piece | Equal
"""The mask of which a branch asks whether it chooses any row."""


@dataclass(slots=True)
class Unchanged:
    """What of a walk is as it was where a mask chooses no row.

    masks: by the symbol that says how many rows they choose, with how often each counts.
    alike: the first of equal masks.
    of:    by result, what it is where there are none, and the mask.
    """

    masks: dict[Any, tuple[Value, int]]
    alike: Callable[[Value], Value]

    of: dict[Value, tuple[Value, Value]] = field(default_factory=dict)


class Skips:
    """Checks the branches of one trace while it is walked."""

    def __init__(self, skips: list[Skip], graph: fx.Graph, walk: Walk, rows: Unchanged) -> None:
        self._walk, self._rows = walk, rows
        self._starting: dict[int, list[Skip]] = {}
        self._ending: dict[int, list[Skip]] = {}
        for skip in skips:
            self._starting.setdefault(skip.start, []).append(skip)
            self._ending.setdefault(skip.end, []).append(skip)
        self._graph = list(graph.nodes) if skips else []
        self._places = {node: i for i, node in enumerate(self._graph)}
        self._before: dict[int, tuple[dict[fx.Node, Any], int]] = {}

    def at(self, place: int) -> None:
        """To be called before the node at ``place`` is walked. Raises `DataDependentError`."""
        for skip in self._ending.get(place, ()):
            self._check(skip)
        for skip in self._starting.get(place, ()):
            self._before[id(skip)] = dict(self._walk.env), len(self._walk.limits)

    def _check(self, skip: Skip) -> None:
        (before, limited), env = self._before.pop(id(skip)), self._walk.env
        if len(self._walk.limits) > limited:
            raise refused(skip.place, "it writes into a parameter")
        makers = {value: node for node in self._walk.nodes for value in node.outputs}
        mask: Asked | None
        finite: Value | None = None
        if isinstance(skip.asked, SomeRows):
            known = self._rows.masks.get(skip.asked.symbol)
            mask = None if known is None else plain(known[0], makers)
        elif isinstance(skip.asked, Hit):
            mask = _hit(env.get(skip.asked.mask), skip.asked.number, makers)
        else:
            mask = _asked_of(env.get(skip.asked), skip.truth, makers)
            finite = finite_clamps.asked_of(env.get(skip.asked), skip.truth, makers)
        if mask is None and finite is None:
            raise refused(
                skip.place,
                "what it asks is not whether a mask chooses any row, or a tensor is not finite",
            )
        pairs = [(was, env[n]) for n, was in before.items() if env[n] is not was]
        left: dict[fx.Node, list[Any]] = {}
        for old, new in skip.left:
            left.setdefault(new, []).append(None if old is None else before.get(old))
        for node in self._graph[skip.start : skip.end]:
            if any(self._places[user] >= skip.end for user in node.users):
                pairs += [(was, env.get(node)) for was in left.get(node, [None])]
        for was, now in pairs:
            if mask is not None and self._is_as_before(was, now, mask, makers):
                continue
            if finite is None:
                raise refused(skip.place, "more of it is read behind it than those rows")
            if not finite_clamps.is_clamped(was, now, finite, makers):
                raise refused(
                    skip.place,
                    "more of it is read behind it than a clamp of that tensor at the lowest and "
                    f"the largest number of {finite.dtype}",
                )
            skip.clamps = finite.dtype

    def _is_as_before(self, was: Any, now: Any, mask: Asked, makers: Makers) -> bool:
        """Whether ``now`` is ``was`` where the mask chooses no row."""
        if not isinstance(was, Value) or not isinstance(now, Value):
            return False
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            return False
        was, now = plain(was, makers), plain(now, makers)
        while now is not was:
            known = self._rows.of.get(now) or _chosen_by(makers.get(now))
            if known is None:
                return False
            base, chosen = known
            if not self._is_part(chosen, mask, makers):
                return False
            now = plain(base, makers)
        return True

    def _is_part(self, chosen: Value, mask: Asked, makers: Makers) -> bool:
        """Whether the rows that ``chosen`` has are among those of ``mask``."""
        chosen = self._rows.alike(_narrow(chosen, makers))
        if isinstance(mask, Piece):
            if _piece(chosen, makers) == mask:
                return True
        elif isinstance(mask, Equal):
            if _equal(chosen, makers) == mask:
                return True
        elif chosen is self._rows.alike(mask):
            return True
        made = makers.get(chosen)
        both = made is not None and made.kind == "and"
        return both and any(self._is_part(v, mask, makers) for v in makers[chosen].inputs)


def _chosen_by(made: Node | None) -> tuple[Value, Value] | None:
    """What a choice is where its mask is false, and the mask."""
    if made is not None and made.kind == "where" and len(made.inputs) == 3:
        return made.inputs[2], made.inputs[0]
    if made is not None and made.kind == "masked_fill" and len(made.inputs) == 2:
        return made.inputs[0], made.inputs[1]
    return None


def _narrow(mask: Value, makers: Makers) -> Value:
    """A mask as it was before it was made as wide as what it chooses of."""
    mask = plain(mask, makers)
    while (made := makers.get(mask)) is not None and made.kind == "expand":
        mask = plain(made.inputs[0], makers)
    return mask


def _asked_of(asked: Any, truth: bool, makers: Makers) -> Value | Equal | None:
    """The mask of which it was asked whether it chooses any row."""
    made = makers.get(plain(asked, makers)) if isinstance(asked, Value) else None
    if made is None or not isinstance(asked, Value):
        return None
    if made.kind == "not":
        return _asked_of(made.inputs[0], not truth, makers)
    if made.kind == "any" and made.output.shape == ():
        return _mask_of(made.inputs[0], makers) if truth else None
    compared: dict[Any, bool] = {
        ("gt", 0): True,
        ("ne", 0): True,
        ("ge", 1): True,
        ("eq", 0): False,
    }
    if compared.get((made.kind, made.attrs.get("other"))) is not truth:
        return None
    counted = plain(made.inputs[0], makers)
    if (one := _bin(counted, makers)) is not None:
        return one
    total = makers.get(counted)
    if total is None or total.kind != "sum" or total.output.shape != ():
        return None
    return _mask_of(total.inputs[0], makers)


def _bin(counted: Value, makers: Makers) -> Equal | None:
    """One of the sums of one-hot rows: how often its number comes up."""
    chosen = makers.get(counted)
    if chosen is None or chosen.attrs.get("dim") != 0:
        return None
    if chosen.kind == "select":
        number = chosen.attrs["index"]
    elif chosen.kind == "split" and set(chosen.attrs["sizes"]) == {1}:  # as a list has them
        number = chosen.outputs.index(counted)
    else:
        return None
    total = makers.get(plain(chosen.inputs[0], makers))
    if total is None or total.kind != "sum" or len(total.output.shape) != 1:
        return None
    rank = len(total.inputs[0].shape)
    hot = makers.get(_counted(total.inputs[0], makers))
    if hot is None or hot.kind != "one_hot":
        return None
    if {d % rank for d in total.attrs["dims"]} != set(range(rank - 1)):
        return None
    return Equal(_counted(hot.inputs[0], makers, shapes=True), number)


def _equal(chosen: Value, makers: Makers) -> Equal | None:
    """``base == number`` in any shape."""
    made = makers.get(plain(chosen, makers))
    if made is None or made.kind != "eq" or not isinstance(made.attrs.get("other"), int):
        return None
    return Equal(_counted(made.inputs[0], makers, shapes=True), made.attrs["other"])


def _mask_of(value: Value, makers: Makers) -> Value | None:
    value = plain(value, makers)
    made = makers.get(value)
    if value.dtype != "bool" and made is not None and made.kind == "cast":
        value = plain(made.inputs[0], makers)
    return value if value.dtype == "bool" else None


def _hit(hit: Any, number: int, makers: Makers) -> Piece | None:
    """Of ``hit = (base.sum(all but dim 0) > 0)`` the entries that entry ``number`` is of."""
    made = makers.get(plain(hit, makers)) if isinstance(hit, Value) else None
    if made is not None and made.kind in ("gt", "ne") and made.attrs.get("other") == 0:
        made = makers.get(plain(made.inputs[0], makers))
    if made is None or made.kind not in ("sum", "any"):
        return None
    base = made.inputs[0]
    rank = len(base.shape)
    if {d % rank for d in made.attrs["dims"]} != set(range(1, rank)):
        return None
    if made.kind == "sum" and not _counts(base, makers):
        return None
    return Piece(_counted(base, makers), number)


def _counts(value: Value, makers: Makers) -> bool:
    """Whether no entry is below zero: ones and zeros of a mask."""
    made = makers.get(value)
    while made is not None and made.kind in ("transpose", "reshape", "identity", "cast"):
        value = made.inputs[0]
        made = makers.get(value)
    return value.dtype == "bool" or (made is not None and made.kind == "one_hot")


def _counted(value: Value, makers: Makers, shapes: bool = False) -> Value:
    """What ``value`` is another dtype of, or another shape."""
    while (made := makers.get(value)) is not None:
        if made.kind not in ("cast", "identity") and not (shapes and made.kind == "reshape"):
            break
        value = made.inputs[0]
    return value


def _piece(chosen: Value, makers: Makers) -> Piece | None:
    """``base[number] != 0`` in any shape."""
    made = makers.get(plain(chosen, makers))
    if made is not None and made.kind == "ne" and made.attrs.get("other") == 0:
        made = makers.get(_counted(made.inputs[0], makers, shapes=True))
    if made is None or not made.inputs:
        return None
    base = _counted(made.inputs[0], makers)
    if made.kind == "select" and made.attrs["dim"] == 0:
        return Piece(base, made.attrs["index"])
    if made.kind == "slice" and made.attrs["dim"] == 0 and made.output.shape[0] == 1:
        return Piece(base, made.attrs["start"])
    if made.kind == "index" and made.attrs["dims"] == (0,):
        number = _number(made.inputs[1], makers)
        return None if number is None else Piece(base, number)
    return None


def _number(value: Value, makers: Makers) -> int | None:
    """The one number that a piece of `arange` is."""
    made = makers.get(plain(value, makers))
    if made is None or math.prod(value.shape) != 1:
        return None
    if made.kind in ("select", "slice"):
        start = made.attrs["index" if made.kind == "select" else "start"]
        steps = makers.get(plain(made.inputs[0], makers))
        if steps is not None and steps.kind == "arange" and isinstance(steps.attrs["start"], int):
            return int(steps.attrs["start"] + start * steps.attrs["step"])
    return None
