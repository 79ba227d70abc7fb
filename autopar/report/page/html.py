"""HTML and SVG elements as text; whatever is not markup already is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"meta", "wbr"})
SHAPES = frozenset({"path", "line", "rect"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """``tag("p", "a < b", class_="note")`` is ``<p class="note">a &lt; b</p>``.

    Underscores of attributes are hyphens, one at the end is dropped; None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    if name in SHAPES and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Markup:
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children))


def dotted(name: str) -> Markup:
    """A name in the letters of code, which may be broken as `breaking` says."""
    return tag("code", breaking(name))


def breaking(name: str) -> Markup:
    """A name that may go on in the next line behind its dots, slashes and underscores, and before
    what is in brackets."""
    first, *rest = re.split(r"(?<=[./:_])(?![./:_])|(?=\()", name)
    return joined([first, *(x for part in rest for x in (tag("wbr"), part))])


def table(
    columns: Iterable[str], rows: Iterable[Iterable[object]], right: Iterable[str] = ()
) -> Markup:
    """Columns in ``right`` hold numbers."""
    columns, numbers = list(columns), set(right)

    def cells(kind: str, row: Iterable[object]) -> Markup:
        named = zip(columns, row, strict=True)
        return joined(tag(kind, c, class_="n" if name in numbers else None) for name, c in named)

    head = tag("thead", tag("tr", cells("th", columns)))
    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def section(title: str, *children: object, note: str = "") -> Markup:
    notes = [tag("p", note, class_="note")] if note else []
    return tag("section", tag("h2", title), *notes, *children)
