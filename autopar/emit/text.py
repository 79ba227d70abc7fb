"""Pieces of Python source: expressions that know how tightly they bind, and wrapped lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.emit.constants import literal, number

COLUMNS = 100

# How tightly an expression binds, as Python's grammar orders it.
COMPARE, OR, XOR, AND, SUM, PRODUCT, UNARY, ATOM = range(8)


@dataclass(frozen=True, slots=True)
class Expr:
    """``text`` of an expression.

    level:  how tightly it binds (`SUM`, `ATOM`, ...).
    reads:  the variables in it.
    weight: how much a reader has to take in at once; see `autopar.emit.pytorch.forward`.
    """

    text: str
    level: int = ATOM
    reads: frozenset[str] = frozenset()
    weight: int = 0

    def within(self, level: int) -> str:
        """The text as an operand of an operator that binds at ``level``."""
        return self.text if self.level >= level else f"({self.text})"

    @property
    def atom(self) -> str:
        """The text as the receiver of a method."""
        return self.within(ATOM)


def variable(name: str) -> Expr:
    return Expr(name, reads=frozenset((name,)))


def constant(value: object) -> Expr:
    """`number` as an operand: a sign, a power and a root bind more loosely than an atom."""
    text = number(value)
    level = PRODUCT if " / " in text else UNARY if text[:1] == "-" or "**" in text else ATOM
    return Expr(text, level)


def tuple_text(values: Iterable[object]) -> str:
    """``(1, 2)``, ``(1,)``, ``()``."""
    shown = [literal(v) for v in values]
    return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"


def axis_argument(axes: Sequence[str]) -> str:
    """``axis="tp"``, or a tuple of several."""
    return f"axis={axes_text(axes)}"


def axes_text(axes: Sequence[str]) -> str:
    """``"tp"``, or a tuple of several."""
    return literal(axes[0] if len(axes) == 1 else tuple(axes))


def docstring(lines: Sequence[str]) -> str:
    """The quotes of several lines stand on one of their own."""
    quotes = '"""'
    return quotes + "\n".join(lines) + ("\n" if len(lines) > 1 else "") + quotes


@dataclass(slots=True)
class Lines:
    """Lines of a function body, wrapped as the formatter would."""

    indent: int
    lines: list[str] = field(default_factory=list)

    def add(self, text: str, comment: str = "", above: bool = False) -> None:
        """One statement; a comment that does not fit beside it goes ``above`` or is left out."""
        pad = " " * self.indent
        line = pad + text
        beside = f"{line}  # {comment}" if comment else line
        if len(beside) <= COLUMNS:
            self.lines.append(beside)
            return
        if comment and above:
            self.lines.append(f"{pad}# {comment}")
        self.lines.extend([line] if len(line) <= COLUMNS else wrap(text, self.indent))

    def document(self, about: Sequence[str]) -> None:
        """A docstring; its first line stands behind the quotes."""
        pad = " " * self.indent
        first, *more = about
        self.lines.append(f'{pad}"""{first}' + ("" if more else '"""'))
        self.lines += [pad + line for line in more] + [f'{pad}"""'] * bool(more)

    def blank(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")


Row = tuple[str] | tuple[str, str] | tuple[str, str, bool]
"""What `Lines.add` takes."""


def lines_of(indent: int, *rows: Row) -> list[str]:
    """A statement a row."""
    lines = Lines(indent)
    for row in rows:
        lines.add(*row)
    return lines.lines


def fits(text: str, indent: int) -> bool:
    return len(text) + indent <= COLUMNS


def wrap(text: str, indent: int) -> list[str]:
    """A statement broken as the formatter does; it stays the same statement.

    The last brackets that leave its head short enough are opened, with the content on one line
    where it fits, else one item a line. An operation or a chain of methods is put in parentheses
    instead.
    """
    pad = " " * indent
    opening = _last_bracket(text, COLUMNS - indent)
    if opening is None:
        return [pad + text]
    target, _, value = text.partition(" = ")
    if value and target.isidentifier() and _is_chain(value) and fits(value, indent + 4):
        return [f"{pad}{target} = (", f"{pad}    {value}", f"{pad})"]
    closing = _closing(text, opening)
    head, inner, tail = text[: opening + 1], text[opening + 1 : closing], text[closing:]
    if not inner:
        return [pad + text]
    if len(pad) + 4 + len(inner) <= COLUMNS and not inner.endswith(","):
        return [pad + head, f"{pad}    {inner}", pad + tail]
    items, end = _pieces(inner, head)
    broken: list[str] = []
    for item in items:
        line = item + end
        broken.extend([f"{pad}    {line}"] if fits(line, indent + 4) else wrap(line, indent + 4))
    return [pad + head, *broken, pad + tail]


def _pieces(inner: str, head: str) -> tuple[list[str], str]:
    """What stands in brackets after ``head``, a line each, and how each line ends.

    A comma is no more than layout after the last argument or member. After a lone index or in
    plain parentheses it would make a tuple, and after a generator it is an error.
    """
    cuts = [i for i, _, depth in _code(inner) if not depth and inner.startswith(" for ", i)]
    if cuts:
        starts = [0, *(i + 1 for i in cuts)]
        return [inner[a:b].strip() for a, b in zip(starts, [*cuts, None], strict=True)], ""
    items = split_items(inner)
    if len(items) > 1 or inner.endswith(","):
        return items, ","
    after_name = head[-2:-1].isalnum() or head[-2:-1] in ("_", ")", "]")
    tuple_made = {"(": not after_name, "[": after_name, "{": False}[head[-1]]
    return items, "" if tuple_made else ","


def _code(text: str) -> Iterator[tuple[int, str, int]]:
    """(place, character, brackets around it) outside of strings; a bracket is outside itself."""
    depth, quoted, skipped = 0, False, False
    for i, char in enumerate(text):
        if skipped:
            skipped = False
        elif quoted:
            skipped = char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        else:
            depth -= char in ")]}"
            yield i, char, depth
            depth += char in "([{"


def _is_chain(text: str) -> bool:
    """Whether operators, or methods of a method's result, stand outside of all brackets."""
    outside = "".join(char for _, char, depth in _code(text) if not depth)
    return " " in outside or outside.count(").") > 1


def _last_bracket(text: str, columns: int) -> int | None:
    """Where the bracket opens that closes last in ``text``; an earlier one where the text before
    it is longer than ``columns``."""
    brackets = [i for i, char, depth in _code(text) if char in "([{" and not depth]
    if text.startswith("def "):
        brackets = brackets[:1]  # of the arguments, not of the result's type
    short = [i for i in brackets if i < columns]
    return short[-1] if short else brackets[-1] if brackets else None


def _closing(text: str, opening: int) -> int:
    for i, char, depth in _code(text[opening:]):
        if char in ")]}" and not depth:
            return opening + i
    raise ValueError(f"unbalanced brackets in {text!r}")


def split_items(inner: str) -> list[str]:
    """The comma-separated items at the top level of ``inner``."""
    cuts = [i for i, char, depth in _code(inner) if char == "," and not depth]
    starts = [0, *(i + 1 for i in cuts)]
    items = [inner[a:b].strip() for a, b in zip(starts, [*cuts, None], strict=True)]
    return items if items[-1] else items[:-1]


def call(function: str, arguments: Sequence[str]) -> str:
    return f"{function}({', '.join(arguments)})"
