"""What repeats stands once: ``blocks.{0..3}`` for four names, and for calls that differ in a number

for i in 1..3
  blocks.{i}/block = block(blocks.{i-1}/block; ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.nouns.text.lines import INDENT, Cursor, Line, filled, name

_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d*)(?!\d)")
_RANGE = re.compile(r"([\w.*/+\-]*)\{(\d+)\.\.(\d+)\}([\w.*/+\-]*)")
THIS, BEFORE = "{i}", "{i-1}"


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A name with the place of one of its numbers."""

    before: str
    number: int
    behind: str

    def at(self, number: int | str) -> str:
        return f"{self.before}{number}{self.behind}"


def _numbered(text: str) -> Iterator[_Numbered]:
    """The numbers of a name, the last first."""
    for there in reversed(list(_NUMBER.finditer(text))):
        yield _Numbered(text[: there.start()], int(there.group()), text[there.end() :])


def names(listed: Sequence[str]) -> str:
    """Names between commas, runs of numbers as ``blocks.{0..3}``."""
    parts: list[str] = []
    done = 0
    while done < len(listed):
        first, length = listed[done], 1
        shown = name(first)
        for numbered in _numbered(first) if shown == first else ():
            count = 1
            while (
                done + count < len(listed)
                and listed[done + count] == numbered.at(numbered.number + count)
            ):  # fmt: skip
                count += 1
            if count > length:
                length, last = count, numbered.number + count - 1
                shown = numbered.at(f"{{{numbered.number}..{last}}}")
        parts.append(shown)
        done += length
    return ", ".join(parts)


def read_names(cursor: Cursor) -> tuple[str, ...]:
    """The inverse of `names`. Raises `TextError`."""

    def item() -> tuple[str, ...]:
        there = _RANGE.match(cursor.line.text, cursor.at)
        if there is None:
            return (cursor.name("a module path, or several as in layers.{0..3}"),)
        cursor.expect(there.group())
        before, first, last, behind = there.groups()
        return tuple(f"{before}{n}{behind}" for n in range(int(first), int(last) + 1))

    return tuple(path for paths in cursor.listed(item) for path in paths)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block: the path of its instance, its lines as they are printed."""

    instance: str
    lines: tuple[str, ...]


def folded(calls: Sequence[Call]) -> Iterator[str]:
    """The lines of calls that follow each other, those that differ in a number once."""
    done = 0
    while done < len(calls):
        first = calls[done]
        for numbered in _numbered(first.instance):
            pattern = _pattern(first.lines, numbered)
            count = 1
            while done + count < len(calls) and calls[done + count] == Call(
                numbered.at(numbered.number + count), _filled(pattern, numbered.number + count)
            ):
                count += 1
            if count > 1 and _filled(pattern, numbered.number) == first.lines:
                yield f"for i in {numbered.number}..{numbered.number + count - 1}"
                yield from (INDENT + line for line in pattern)
                done += count
                break
        else:
            yield from first.lines
            done += 1


def _pattern(lines: tuple[str, ...], numbered: _Numbered) -> tuple[str, ...]:
    """``lines`` with the numbers of this instance and of the one before it left open."""
    found = list(lines)
    for number, mark in ((numbered.number, THIS), (numbered.number - 1, BEFORE)):
        path = re.compile(rf"(?<![\w.]){re.escape(numbered.at(number))}(?!\w)")
        open_path = numbered.at(mark).replace("\\", r"\\")
        found = [path.sub(open_path, line) for line in found]
    return tuple(found)


def _filled(pattern: tuple[str, ...], number: int) -> tuple[str, ...]:
    return tuple(filled(line, _values(number)) for line in pattern)


def _values(number: int) -> dict[str, str]:
    return {THIS: str(number), BEFORE: str(number - 1)}


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
            yield from (inner.filled(_values(number)) for inner in line.below)
