"""Which layers are taken as alike; a trace that shows otherwise narrows it down."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from autopar.frontends.pytorch.calls import Calls, NotAlike, Note, Place
from autopar.frontends.pytorch.repeats import can_be_lent, find_repeats, lent

SPLITS = 4  # sorts of layers in one group that are still told from one another by trying


class Repeats:
    """Which layers are taken as alike; a trace that shows otherwise narrows it down."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.members = find_repeats(model)
        self.apart: set[int] = set()
        self.repeated: set[int] = set()
        self.firsts: dict[Place, int] = {}  # with the group
        self.lent: set[int] = set()  # groups whose calls are handed their tensors from outside
        self.leaks: dict[int, list[Hashable]] = {}  # what of a group is used outside, unreturned

    def split(self, error: NotAlike) -> None:
        splits = sum(group == error.group for group in self.firsts.values())
        leaks = self.leaks.setdefault(error.group, [])
        if error.leaked is not None and error.leaked not in leaks:
            leaks.append(error.leaked)
        elif error.repeated:
            self.repeated.add(error.group)
        elif error.several and self._may_lend(error.group):
            self._lend(error.group)
        elif error.first is None or splits == SPLITS:
            self.apart.add(error.group)
        else:
            self.firsts[error.first] = error.group

    def _may_lend(self, group: int) -> bool:
        if group in self.lent:
            return False
        return all(can_be_lent(m) for m in self.members.values() if m.group == group)

    def _lend(self, group: int) -> None:
        """Every member is a group of its own now, and its calls are handed its tensors."""
        fresh = 1 + max(m.group for m in self.members.values())
        for key, member in self.members.items():
            if member.group == group:
                self.members[key] = lent(member, fresh, self.model)
                self.lent.add(fresh)
                self.repeated.add(fresh)
                fresh += 1

    def calls(self, note: Note) -> Calls:
        members = [m for m in self.members.values() if m.group not in self.apart]
        return Calls(members, self.repeated, set(self.firsts), self.leaks, note)
