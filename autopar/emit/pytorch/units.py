"""The modules whose parameters travel together, as a program's settings name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.lowering.collectives import gathered_again
from autopar.lowering.lowered import Lowered
from autopar.nouns.graph import Graph
from autopar.rules.narrow_gathers import names_of_narrow


def units_of(lowered: Lowered, in_order: bool) -> tuple[str, ...]:
    """Patterns of the repeated blocks: ``head.*`` stands for a list of which every member repeats;
    other members are named. ``in_order``: what is named is to follow the order of the calls, for
    which members of such a list may be named too.
    """
    blocks = lowered.graph.blocks.values()
    units = _called(lowered) if in_order else [name for block in blocks for name in block.units]
    lists = _lists(lowered, set(units))
    patterns = tuple(dict.fromkeys(_pattern(name, lists) for name in units))
    if in_order and [*_expanded(patterns, units)] != units:
        return tuple(units)
    return patterns


def forward_only(lowered: Lowered) -> tuple[str, ...]:
    """Units that no gradient passes, in the order of their calls."""
    passed = gathered_again(lowered, by_itself=False)
    return tuple(name for name in _called(lowered) if name not in passed)


def gathered_narrow(graph: Graph) -> tuple[str, ...]:
    """Patterns of the weights that are gathered in 8 bits: ``*`` stands for a number where all that
    are named alike are such."""
    narrow = names_of_narrow(graph)
    alike: dict[str, list[str]] = {}
    for name, _ in graph.parameters():
        alike.setdefault(_numbered(name), []).append(name)
    patterns: list[str] = []
    for pattern, names in alike.items():
        patterns += [pattern] if narrow.issuperset(names) else [n for n in names if n in narrow]
    return tuple(patterns)


def _numbered(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _called(lowered: Lowered) -> list[str]:
    """Units in the order of their calls."""
    units = {name for block in lowered.graph.blocks.values() for name in block.units}
    calls = (op.op.attrs["instance"] for op in lowered.ops if op.op.kind == "block")
    return [name for name in calls if name in units]


def _lists(lowered: Lowered, units: set[str]) -> set[str]:
    """Paths of lists all of whose members are units."""
    members: dict[str, set[str]] = {}
    for name, _ in lowered.graph.parameters():
        parts = name.split(".")
        for i in range(1, len(parts)):
            members.setdefault(".".join(parts[:i]), set()).add(".".join(parts[: i + 1]))
    return {head for head, all_of in members.items() if all_of <= units}


def _pattern(name: str, lists: set[str]) -> str:
    head, _, last = name.rpartition(".")
    return f"{head}.*" if last.isdigit() and head in lists else name


def _expanded(patterns: Sequence[str], units: Sequence[str]) -> Iterator[str]:
    """Units in the order in which `autopar.runtime.pytorch.units` has them: pattern by
    pattern, the members of a list by their numbers."""
    for pattern in patterns:
        head, _, last = pattern.rpartition(".")
        if last != "*":
            yield pattern
            continue
        of_list = [name for name in units if name.rpartition(".")[0] == head]
        yield from sorted(of_list, key=lambda name: int(name.rpartition(".")[2]))
