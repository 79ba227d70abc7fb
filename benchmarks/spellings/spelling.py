"""One way to write one thing that models do: a record, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar import Workload

WAYS = 5
"""How many of each thing there are."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """thing: what the model does, "causal mask"; way: how it is written, "masked_fill of a buffer".

    source:   who writes it so: a public repository and file, a textbook and chapter, a tutorial.
    needs:    a package that it imports and that may not be there, or nothing.
    """

    framework: str
    thing: str
    way: str
    source: str
    workload: Callable[[], Workload]
    needs: str = ""

    @property
    def name(self) -> str:
        return f"{self.framework}/{self.thing}/{self.way}"


SPELLINGS: dict[str, Spelling] = {}
"""By name, in the order of the files."""


def add(spelling: Spelling) -> None:
    """Puts it into `SPELLINGS`, where no other has its name."""
    assert spelling.name not in SPELLINGS, spelling.name
    SPELLINGS[spelling.name] = spelling
