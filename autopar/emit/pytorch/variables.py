"""Which variables of a forward are free to be bound again."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.emit.names import BUILTINS, FUNCTIONS, first_free


class Variables:
    """Each variable has holders: a tensor that is read later, an expression not yet printed."""

    def __init__(self) -> None:
        self._holders: dict[str, set[str]] = {}

    def hold(self, names: Iterable[str], holder: str) -> None:
        for name in names:
            self._holders.setdefault(name, set()).add(holder)

    def release(self, holder: str) -> None:
        """Everything that ``holder`` held is free as far as it is concerned."""
        for name in [n for n, h in self._holders.items() if holder in h]:
            self._holders[name].discard(holder)
            if not self._holders[name]:
                del self._holders[name]

    def pick(self, hints: Iterable[str], holder: str) -> str:
        """The first hint that is free, else the last with a number; ``holder`` holds it now."""
        name = first_free(hints, self._holders.keys() | FUNCTIONS | BUILTINS | {"probe"})
        self.hold((name,), holder)
        return name
