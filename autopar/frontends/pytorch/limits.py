"""Parameters that a forward keeps between limits: ``self.weight.data.clamp_(-c, c)``.

Autograd does not see the write, and done twice it does what it did once. So where nothing has read
the parameter before, it may as well stand ahead of the forward: what follows reads the parameter
itself, and a program brings every rank's pieces between the limits before each step (`Settings`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.frontends.pytorch.calls import Kind
from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.nouns.graph import Source
from autopar.torch_private.ops import op_name

Limits = tuple[float | None, float | None]
"""The lowest and the highest value, None for one that is open."""

_ALIASES = frozenset({"detach", "identity"})
_SAME = frozenset({"detach", "alias"})


@dataclass(frozen=True, slots=True)
class Limited:
    """One write. ``others``: the same parameter of the other calls of a layer that repeats."""

    limits: Limits
    others: tuple[str, ...]
    source: Source


def is_limit(lifter: Lifter, node: fx.Node, made: Any) -> bool:
    """Whether an op in place, the result of which is ``made``, brings a whole parameter between
    two numbers."""
    maker = lifter.maker(made) if isinstance(made, Value) else None
    held = lifter.env.get(_root(lifter, node)) if _whole(lifter, node) else None
    if maker is None or maker.kind != "clamp" or not isinstance(held, Value):
        return False
    return held.role == "parameter" and held.dtype == made.dtype and held.shape == made.shape


def _root(lifter: Lifter, node: fx.Node) -> fx.Node:
    view: Any = node.args[0]
    return lifter.root(view)


def _whole(lifter: Lifter, node: fx.Node) -> bool:
    """Whether ``node`` writes into a tensor of the model, or what looks at all of it as it is."""
    view: Any = node.args[0]
    while view in lifter.views:
        if view.op == "call_function" and op_name(view.target) not in _SAME:
            return False
        view = lifter.views[view]
    return bool(view.op == "get_attr")


def hold_limits(lifter: Lifter, node: fx.Node, made: Value, before: int) -> None:
    """Takes the write down in ``lifter.limits``, and its ops, those from number ``before`` on, out
    of the walk. Raises `MutationError` where it may not stand ahead of the forward."""
    maker = lifter.maker(made)
    held: Value = lifter.env[_root(lifter, node)]
    assert maker is not None
    limits = maker.attrs["min"], maker.attrs["max"]
    del lifter.nodes[before:]
    known = lifter.limits.get(held.name)
    if known is not None and known.limits == limits:
        return  # once more the same
    if known is not None or _is_read(lifter.nodes, held) or _may_be_read(lifter, held.name):
        raise MutationError(
            f"{lifter.source}: the forward writes into parameter {held.name!r} what it has read or "
            "written already, so the write cannot stand ahead of the step: clamp it once, before "
            "anything reads it, or compute a new tensor"
        )
    lifter.limits[held.name] = Limited(limits, _others(lifter, held.name), lifter.source)


def limits_of(lifter: Lifter) -> dict[str, Limits]:
    """The limits by parameter. Raises `MutationError` where what is outside of a layer reads what
    only some later call of the layer brings between them."""
    read = {v.name for node in lifter.nodes for v in node.inputs if v.role == "parameter"}
    every: dict[str, Limits] = {}
    for name, limited in lifter.limits.items():
        outside = next((other for other in limited.others if other in read), None)
        if outside is not None:
            raise MutationError(
                f"{limited.source}: the layer clamps its parameter, and {outside!r} is read "
                "outside of its layer too, maybe ahead of that: clamp all of them at the start of "
                "the model's forward"
            )
        every |= dict.fromkeys((name, *limited.others), limited.limits)
    return every


def _is_read(nodes: list[Node], held: Value) -> bool:
    same = {held}
    for node in nodes:
        if same.isdisjoint(node.inputs):
            continue
        if node.kind not in _ALIASES:
            return True
        same.update(node.outputs)
    return False


def _layer(lifter: Lifter) -> Kind | None:
    """The layer that repeats in which the op at hand stands."""
    mark = next((n for n in reversed(lifter.nodes) if n.kind in ("enter", "leave")), None)
    if mark is None or mark.kind == "leave":
        return None
    kind = lifter.trace.kinds[mark.attrs["number"]]
    return kind if len(kind.paths) > 1 else None


def _may_be_read(lifter: Lifter, name: str) -> bool:
    """Whether a call of a layer that was walked for the first of its calls alone may have read it:
    of a layer that repeats only that one's own parameters are seen to be read."""
    here = _layer(lifter)
    met = {n.attrs["number"] for n in lifter.nodes if n.kind in ("enter", "call")}
    kinds = (lifter.trace.kinds[number] for number in met)
    return any(
        _under(name, path)
        for kind in kinds
        for path in kind.paths[kind is here :]
        if len(kind.paths) > 1
    )


def _others(lifter: Lifter, name: str) -> tuple[str, ...]:
    return tuple(_named_alike(_layer(lifter), name))


def _named_alike(kind: Kind | None, name: str) -> Iterator[str]:
    if kind is None or name in kind.shared or not _under(name, kind.paths[0]):
        return
    for path in kind.paths[1:]:
        if path != kind.paths[0]:
            yield f"{path}{name.removeprefix(kind.paths[0])}"


def _under(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")
