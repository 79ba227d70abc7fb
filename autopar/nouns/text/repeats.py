"""What repeats stands once: names as ``blocks.{0..3}`` or ``cell * 3``, and lines that hold a call

    for i in 1..3
      blocks.{i}/block = block(blocks.{i-1}/block; block="Block", instance="blocks.{i}") : ...

where nothing but numbers differs that all grow by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.nouns.text.lines import INDENT, Cursor, Line, name

_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d*)(?!\d)")
_RANGE = re.compile(r"([\w.*/+\-]*)\{(\d+)\.\.(\d+)\}([\w.*/+\-]*)")
_MARK = re.compile(r"\{i([+-]\d+)?\}")
LONGEST = 8
"""Lines (with those below them) that are looked at together."""


# --- names -----------------------------------------------------------------------------------


def names(listed: Sequence[str]) -> str:
    """Names between commas, runs of equal ones and of numbers once."""
    parts: list[str] = []
    done = 0
    while done < len(listed):
        length, shown = max(_runs(listed[done:]))
        parts.append(shown)
        done += length
    return ", ".join(parts)


def _runs(listed: Sequence[str]) -> Iterator[tuple[int, str]]:
    """How many names from the first on can stand as one, and how."""
    first = listed[0]
    yield 1, name(first)
    equal = next((i for i, other in enumerate(listed) if other != first), len(listed))
    if equal > 1:
        yield equal, f"{name(first)} * {equal}"
    for there in _NUMBER.finditer(first) if name(first) == first else ():
        before, number, behind = first[: there.start()], int(there.group()), first[there.end() :]
        count = 1
        while count < len(listed) and listed[count] == f"{before}{number + count}{behind}":
            count += 1
        if count > 1:
            yield count, f"{before}{{{number}..{number + count - 1}}}{behind}"


def read_names(cursor: Cursor) -> tuple[str, ...]:
    """The inverse of `names`. Raises `TextError`."""

    def item() -> tuple[str, ...]:
        there = _RANGE.match(cursor.line.text, cursor.at)
        if there is None:
            path = cursor.name("a module path, or several as in layers.{0..3}")
            return (path,) * (cursor.number("how often") if cursor.take("*") else 1)
        cursor.expect(there.group())
        before, first, last, behind = there.groups()
        return tuple(f"{before}{n}{behind}" for n in range(int(first), int(last) + 1))

    return tuple(path for paths in cursor.listed(item) for path in paths)


# --- lines -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A line with those below it; ``call``: it calls a block."""

    lines: tuple[str, ...]
    call: bool = False


def folded(entries: Sequence[Entry]) -> Iterator[str]:
    """The lines of ``entries``, calls that repeat once, with what stands before each."""
    done = 0
    while done < len(entries):
        length, count = _repeated(entries, done)
        lines = [line for entry in entries[done : done + length] for line in entry.lines]
        if count > 1:
            later = [line for e in entries[done + length : done + 2 * length] for line in e.lines]
            first, lines = _opened(lines, later)
            yield f"for i in {first}..{first + count - 1}"
            lines = [INDENT + line for line in lines]
        yield from lines
        done += length * count


def _repeated(entries: Sequence[Entry], start: int) -> tuple[int, int]:
    """How many entries from ``start`` on repeat, and how often: (1, 1) where none do."""
    for length in range(1, LONGEST + 1):
        unit = entries[start : start + length]
        if not any(entry.call for entry in unit):
            continue
        count, step = 1, None
        while True:
            at = start + count * length
            growth = _growth(entries[at - length : at], entries[at : at + length])
            if not any(growth) or step not in (None, growth):
                break
            count, step = count + 1, growth
        if count > 1:
            return length, count
    return 1, 1


def _growth(one: Sequence[Entry], two: Sequence[Entry]) -> list[int]:
    """By how much every number grows; empty where anything else differs, or more than by one."""
    if len(one) != len(two):
        return []
    a, b = ("\n".join(line for e in entries for line in e.lines) for entries in (one, two))
    if "{i" in a or _NUMBER.split(a) != _NUMBER.split(b):
        return []
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    grown = [int(n) - int(m) for m, n in pairs]
    return grown if set(grown) <= {0, 1} else []


def _opened(lines: Sequence[str], later: Sequence[str]) -> tuple[int, list[str]]:
    """The first number that grows, and ``lines`` with all of those in its terms."""
    a, b = ([int(n) for n in _NUMBER.findall("\n".join(some))] for some in (lines, later))
    first = next(m for m, n in zip(a, b, strict=True) if m != n)
    texts = iter(_mark(m - first) if m != n else str(m) for m, n in zip(a, b, strict=True))
    return first, [_NUMBER.sub(lambda _: next(texts), line) for line in lines]


def _mark(offset: int) -> str:
    return f"{{i{offset:+d}}}" if offset else "{i}"


def unfolded(lines: Sequence[Line]) -> Iterator[Line]:
    """``lines`` with every ``for`` written out. Raises `TextError`."""
    for line in lines:
        if not line.text.startswith("for i in "):
            yield line
            continue
        cursor = Cursor(line)
        cursor.expect("for i in")
        first = cursor.number("the first number, as in 1..3")
        cursor.expect("..")
        last = cursor.number("the last number, as in 1..3")
        cursor.end()
        for number in range(first, last + 1):
            yield from (_filled(inner, number) for inner in line.below)


def _filled(line: Line, number: int) -> Line:
    """The line and those below with ``number`` in its open places."""
    text = _MARK.sub(lambda mark: str(number + int(mark.group(1) or 0)), line.text)
    return replace(line, text=text, below=[_filled(inner, number) for inner in line.below])
