"""How a plan splits linear layers over tp, in the words of trainers that go by module name.

A weight [n, k] that is split along n is a *column* layer, along k a *row* layer. Trainers leave the
result of a column layer split and sum that of a row layer, which is right where a group of layers
(``self_attn``, ``mlp``) begins with columns and ends with rows. A plan may also split a column and
gather its result, or leave a layer whole between split ones: such a group is not *paired*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.emit.exports.setup import StoredTensor
from autopar.nouns.axes import TENSOR

Style = Literal["column", "row", "whole"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Layers of one name: ``layers.*.mlp.up``. paired: see the module."""

    pattern: str
    style: Style
    paired: bool
    kind: str
    """linear or embedding"""


def layers(parameters: Iterable[StoredTensor]) -> list[Layer]:
    """The linear layers and embeddings of a model, equal ones of repeated layers once."""
    styles: dict[str, tuple[Style, str]] = {}
    for p in parameters:
        name, _, last = p.name.rpartition(".")
        if last == "weight" and len(p.shape) == 2 and p.kind in ("linear", "embedding"):
            styles.setdefault(wildcard(name), (_style(p), p.kind))
    groups: dict[str, set[Style]] = {}
    for pattern, (style, kind) in styles.items():
        if kind == "linear":
            groups.setdefault(pattern.rpartition(".")[0], set()).add(style)
    return [
        Layer(p, style, groups.get(p.rpartition(".")[0]) == {"column", "row"}, kind)
        for p, (style, kind) in styles.items()
    ]


def wildcard(name: str) -> str:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _style(p: StoredTensor) -> Style:
    placement = p.sharding.on(TENSOR)
    if placement.kind != "S":
        return "whole"
    return "column" if placement.dim == 0 else "row"
