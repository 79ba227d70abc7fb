"""Classes that differ in widths alone are one class, whose constructor is given them.

Two classes of one name are the same but for numbers where their `__init__` statements and their
forwards are equal without numbers and comments. A number of `__init__` that not all of them have
becomes an argument, or a multiple of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.emit.marks import unmarked
from autopar.emit.names import first_free
from autopar.emit.text import COLUMNS, Lines, split_items

MOST = 3
"""Arguments that still are less to read than another class."""
_NUMBER = re.compile(r'(?<![\w."\'-])\d+(?![\w."\'])')
_INIT = "    def __init__(self) -> None:"
_LETTERS = "nmkhijl"
Column = tuple[int, ...]
"""One number as the classes have it, one after the other."""


@dataclass(frozen=True, slots=True)
class _Class:
    """init: statements, a line each. forward: lines with their comments apart."""

    head: str
    about: str
    init: tuple[str, ...]
    forward: tuple[tuple[str, str], ...]

    @staticmethod
    def of(text: str) -> _Class | None:
        """None of a class without a constructor, or with arguments."""
        lines = unmarked(text + "\n").removesuffix("\n").split("\n")
        if _INIT not in lines:
            return None
        start = lines.index(_INIT)
        end = lines.index("", start) if "" in lines[start:] else len(lines)
        about = "\n".join(lines[1:start]).strip()
        body = tuple(_apart(line) for line in lines[end:])
        return _Class(lines[0], about, tuple(statements(lines[start + 1 : end])), body)

    @property
    def skeleton(self) -> tuple[object, ...]:
        """Equal for classes that differ in numbers of the constructor, and in comments."""
        return self.head, tuple(map(_blank, self.init)), tuple(code for code, _ in self.forward)


def _apart(line: str) -> tuple[str, str]:
    code, mark, comment = line.rpartition("# ")
    return (code.rstrip(), comment) if mark else (line, "")


def _blank(text: str) -> str:
    return _NUMBER.sub("#", text)


def statements(lines: Iterable[str]) -> list[str]:
    """Wrapped statements of a function of a class, each on a line of its own."""
    joined: list[str] = []
    for line in lines:
        text = line.strip()
        if line.startswith(" " * 9) or (joined and text[:1] in tuple(")]}")):
            before = joined[-1]
            if text[:1] in tuple(")]}"):
                joined[-1] = (before if _is_one_tuple(before) else before.removesuffix(",")) + text
            else:
                joined[-1] = before + ("" if before[-1:] in tuple("([{") else " ") + text
        else:
            joined.append(text)
    return joined


def _is_one_tuple(text: str) -> bool:
    """Whether a tuple of one member is open at the end: its comma is no layout."""
    for start in reversed([i for i, char in enumerate(text) if char in "([{"]):
        inner = text[start + 1 :]
        if all(inner.count(a) == inner.count(b) for a, b in ("()", "[]", "{}")):
            called = start > 0 and (text[start - 1].isalnum() or text[start - 1] in "_)]")
            return text[start] == "(" and not called and len(split_items(inner)) == 1
    return False


def with_arguments(
    classes: Mapping[str, str], hints: Mapping[str, str], top: str
) -> tuple[dict[str, str], str]:
    """The classes by name, from their bases on, and ``top``, the text that makes them.

    hints: the name that each class would have had without a number behind it.
    """
    texts = dict(classes)
    while True:
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, text in texts.items():
            known = _Class.of(text)
            if known is not None:
                groups.setdefault((hints[name], known.skeleton), []).append(name)
        merged = next((m for names in groups.values() if (m := _merged(names, texts))), None)
        if merged is None:
            return _numbered(texts, hints, top)
        text, made = merged
        first, *others = made
        texts[first] = text
        for name in others:
            del texts[name]

        def change(line: str, made: Mapping[str, str] = made) -> str:
            return re.sub(r"\b(\w+)\(\)", lambda m: made.get(m[1], m[0]), line)

        texts = {name: changed(text, change) for name, text in texts.items()}
        top = changed(top, change)


def _numbered(
    texts: Mapping[str, str], hints: Mapping[str, str], top: str
) -> tuple[dict[str, str], str]:
    """Without gaps in the numbers of classes of one name."""
    names: dict[str, str] = {}
    for name in texts:
        taken = {*names.values(), *(other for other in texts if other not in names)}
        lower = [other for other in hints if hints[other] == hints[name] and other not in taken]
        names[name] = min([*lower, name], key=lambda other: (len(other), other))

    def renamed(text: str) -> str:
        return re.sub(r"(?<![\w.])\w+(?=\()", lambda m: names.get(m[0], m[0]), text)

    return {names[name]: renamed(text) for name, text in texts.items()}, renamed(top)


def changed(text: str, change: Callable[[str], str]) -> str:
    """``text`` with the statements of its constructors changed, and broken into lines again."""
    lines = text.split("\n")
    made: list[str] = []
    at = 0
    while at < len(lines):
        made.append(lines[at])
        at += 1
        if not lines[at - 1].startswith("    def __init__("):
            continue
        end = lines.index("", at) if "" in lines[at:] else len(lines)
        own = statements(lines[at:end])
        new = [change(one) for one in own]
        if new == own:
            made += lines[at:end]
        else:
            body = Lines(8)
            for one in new:
                body.add(one)
            made += body.lines
        at = end
    return "\n".join(made)


def _merged(names: Sequence[str], texts: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """The text of the one class, and how each of ``names`` is made of it; None for nothing."""
    every = [known for name in names if (known := _Class.of(texts[name])) is not None]
    if len(every) < 2:
        return None
    first = every[0]
    columns = [_columns([c.init[i] for c in every]) for i in range(len(first.init))]
    given = _arguments(first.init, columns)
    if len(given) > MOST:
        return None
    words = _Words(given)
    init = Lines(8)
    for line, own in zip(first.init, columns, strict=True):
        init.add(_filled(line, map(words.text, own)))
    about = _alike([c.about for c in every], words) or '"""Of several widths."""'
    arguments = "".join(f", {name}: int" for name in given.values())
    lines = [
        first.head,
        f"    {about}",
        "",
        _INIT.replace("(self", f"(self{arguments}"),
        *init.lines,
    ]
    for place, (code, comment) in enumerate(first.forward):
        comment = _alike([c.forward[place][1] for c in every], words)
        line = f"{code}  # {comment}" if code and comment else code
        if comment and not code:
            line = f"        # {comment}"
        if line or not first.forward[place][1]:
            lines.append(line if len(line) <= COLUMNS else code)
    made = {}
    for place, name in enumerate(names):
        shown = ", ".join(f"{argument}={column[place]}" for column, argument in given.items())
        made[name] = f"{names[0]}({shown})"
    return "\n".join(lines), made


def _columns(lines: Sequence[str]) -> list[Column]:
    """Every number of statements that are the same but for numbers."""
    return list(zip(*(map(int, _NUMBER.findall(line)) for line in lines), strict=True))


def _filled(line: str, words: Iterable[str]) -> str:
    following = iter(words)
    return _NUMBER.sub(lambda _: next(following), line)


def _alike(lines: Sequence[str], words: _Words) -> str:
    """A comment of all classes at once; nothing where they say different things."""
    if len({_blank(line) for line in lines}) > 1:
        return ""
    return _filled(lines[0], map(words.shown, _columns(lines)))


def _arguments(init: Sequence[str], columns: Sequence[Sequence[Column]]) -> dict[Column, str]:
    """A name for each column that is no multiple of another one."""
    places: dict[Column, list[str]] = {}
    for line, own in zip(init, columns, strict=True):
        for column, match in zip(own, _NUMBER.finditer(line), strict=True):
            if len(set(column)) > 1:
                places.setdefault(column, []).append(line[: match.start()])
    bases = [c for c in places if not any(_times(c, other) for other in places if other != c)]
    widest = max(bases, key=lambda column: len(places[column]), default=())
    names: dict[Column, str] = {}
    for column in sorted(bases, key=lambda column: column != widest):
        hint = _hint(places[column][0])
        if column == widest and len(places[column]) > 1:
            hint = "width"
        names[column] = first_free([hint], names.values())
    return dict(sorted(names.items(), key=lambda item: item[1] != "inputs"))


def _hint(before: str) -> str:
    """A name for the number behind ``before``."""
    if re.search(r"weight=Parameter\(\(\d+, $", before):
        return "inputs"
    if re.search(r"weight=Parameter\(\($", before):
        return "outputs"
    named = re.search(r"(\w+)=\(?(?:\d+, )*$", before)
    return named[1] if named else "size"


def _times(column: Column, base: Column) -> int:
    """Which multiple of ``base`` a column is; 0 for none."""
    times, rest = divmod(column[0], base[0]) if base[0] else (0, 1)
    return 0 if rest or any(a != times * b for a, b in zip(column, base, strict=True)) else times


@dataclass(slots=True)
class _Words:
    """What numbers are in the one class: the same as ever, or what the constructor is given."""

    given: Mapping[Column, str]
    letters: dict[Column, str] = field(default_factory=dict)

    def text(self, column: Column) -> str:
        """In code."""
        if len(set(column)) == 1:
            return str(column[0])
        for base, name in self.given.items():
            if times := _times(column, base):
                return name if times == 1 else f"{times} * {name}"
        raise ValueError(f"{column} follows from none of {dict(self.given)}")

    def shown(self, column: Column) -> str:
        """In a comment, where what nobody is given is a letter."""
        if len(set(column)) == 1 or any(_times(column, base) for base in self.given):
            return self.text(column)
        letter = first_free([*_LETTERS], self.letters.values())
        return self.letters.setdefault(column, letter)
