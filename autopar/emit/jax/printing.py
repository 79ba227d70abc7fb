"""What all functions of a JAX program have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.emit.sizes import NONE, Sizes

Marks = Literal["none", "statements", "each"]
"""What is marked, see `autopar.emit.marks`; ``each``: every op, which is a statement then."""


@dataclass(frozen=True, slots=True)
class Printing:
    """What all functions of a program have in common.

    functions: their names, of blocks by name and of ops with a derivative of their own by `key`.
    reserved:  names that variables must not have.
    sizes:     what sizes that follow from the batch are called.
    arguments: by block, names of inputs that the model gives none.
    scatters:  of the plan.
    carries:   of a step of a scan, how many of its results go on to the next; None: it is none.
    """

    functions: Mapping[str, str]
    reserved: frozenset[str]
    marks: Marks = "none"
    sizes: Sizes = NONE
    arguments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    scatters: Mapping[str, int] = field(default_factory=dict)
    carries: int | None = None
