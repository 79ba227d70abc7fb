"""What all texts are made of: indented lines, and on a line names, JSON values and marks.

A name of letters, digits, ``_ . * / + -`` and ``::`` stands as it is, where no ``-`` begins it; any
other is a JSON string. A line that begins with ``#`` is a comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from autopar.nouns.errors import UserError

INDENT = "  "

NAME = re.compile(r"[\w.*/+][\w.*/+\-]*(?:::[\w.*/+\-]+)*")
_NUMBER = re.compile(r"\d+")
_DECODER = json.JSONDecoder()

Item = TypeVar("Item")


class TextError(UserError, ValueError):
    """A text that cannot be read; the message has the line and what was expected there."""


@dataclass(slots=True)
class Line:
    """``text`` without its indentation, and the lines that stand deeper below it."""

    number: int
    indent: int
    text: str
    below: list[Line] = field(default_factory=list)

    def fail(self, expected: str, column: int = 0) -> NoReturn:
        """Raises `TextError`."""
        rest = self.text[column:]
        there = f"{rest[:40]}{' ...' if len(rest) > 40 else ''}" if rest else "the end of the line"
        raise TextError(
            f"line {self.number}, column {self.indent + column + 1}: expected {expected}, "
            f"there is {there}"
        )

    def literal(self) -> str:
        """The lines below as the text that they are."""
        base = self.below[0].indent if self.below else 0
        return "\n".join(" " * (line.indent - base) + line.text for line in _flat(self.below))


def tree(text: str) -> list[Line]:
    """The lines of ``text`` that are not indented, each with those below it. Raises `TextError`."""
    top: list[Line] = []
    open_lines: list[Line] = []
    for number, raw in enumerate(text.split("\n"), 1):
        body = raw.lstrip(" ")
        if not body.strip() or body.startswith("#"):
            continue
        line = Line(number, len(raw) - len(body), body)
        while open_lines and open_lines[-1].indent >= line.indent:
            open_lines.pop()
        if not open_lines and line.indent:
            raise TextError(f"line {number}, column 1: expected a line that is not indented")
        (open_lines[-1].below if open_lines else top).append(line)
        open_lines.append(line)
    return top


def is_literal(text: str) -> bool:
    """Whether `Line.literal` gives ``text`` back where it stands below a line."""
    lines = text.split("\n")
    return (
        len(lines) > 1
        and not lines[0].startswith(" ")
        and all(line.strip() and not line.lstrip(" ").startswith("#") for line in lines)
    )


def _flat(lines: list[Line]) -> Iterator[Line]:
    for line in lines:
        yield line
        yield from _flat(line.below)


def name(text: str) -> str:
    """A name as it stands in a text."""
    return text if NAME.fullmatch(text) else json.dumps(text)


def value(data: Any) -> str:
    """A JSON-like value: tuples are lists, and equal dicts are equal texts."""
    return json.dumps(data, sort_keys=True)


def shape(sizes: tuple[int, ...]) -> str:
    """``[64, 512]``."""
    return f"[{', '.join(map(str, sizes))}]"


@dataclass(slots=True)
class Cursor:
    """A place on a line; what is read is behind it, and so are the spaces."""

    line: Line
    at: int = 0

    def fail(self, expected: str) -> NoReturn:
        """Raises `TextError`."""
        self.line.fail(expected, self.at)

    @property
    def done(self) -> bool:
        return self.at >= len(self.line.text)

    def sees(self, mark: str) -> bool:
        return self.line.text.startswith(mark, self.at)

    def matches(self, pattern: re.Pattern[str]) -> bool:
        return pattern.match(self.line.text, self.at) is not None

    def take(self, mark: str) -> bool:
        """Whether ``mark`` stands here; it is passed then."""
        if not self.sees(mark):
            return False
        self._pass(self.at + len(mark))
        return True

    def word(self, word: str) -> bool:
        """Whether the name ``word``, and no longer one, stands here; it is passed then."""
        there = NAME.match(self.line.text, self.at)
        return there is not None and there.group() == word and self.take(word)

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            self.fail(repr(mark))

    def name(self, what: str) -> str:
        """A name, quoted or not; ``what`` it is of."""
        if self.sees('"'):
            text = self.value(what)
            assert isinstance(text, str)
            return text
        return self.matching(NAME, what)

    def number(self, what: str) -> int:
        return int(self.matching(_NUMBER, what))

    def value(self, what: str) -> Any:
        """A JSON value."""
        try:
            data, end = _DECODER.raw_decode(self.line.text, self.at)
        except ValueError:
            self.fail(what)
        self._pass(end)
        return data

    def until(self, mark: str) -> str:
        """Everything before ``mark``, which is passed too."""
        end = self.line.text.find(mark, self.at)
        if end < 0:
            self.fail(f"text that ends with {mark!r}")
        text = self.line.text[self.at : end].rstrip(" ")
        self._pass(end + len(mark))
        return text

    def listed(self, item: Callable[[], Item], end: str = "") -> tuple[Item, ...]:
        """Items between commas; none where ``end`` stands here at once."""
        if end and self.sees(end):
            return ()
        items = [item()]
        while self.take(","):
            items.append(item())
        return tuple(items)

    def shape(self) -> tuple[int, ...]:
        self.expect("[")
        sizes = self.listed(lambda: self.number("a size"), "]")
        self.expect("]")
        return sizes

    def end(self) -> None:
        if not self.done:
            self.fail("the end of the line")

    def matching(self, pattern: re.Pattern[str], what: str) -> str:
        there = pattern.match(self.line.text, self.at)
        if there is None:
            self.fail(what)
        self._pass(there.end())
        return there.group()

    def _pass(self, to: int) -> None:
        text = self.line.text
        while to < len(text) and text[to] == " ":
            to += 1
        self.at = to
