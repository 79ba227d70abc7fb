"""Reads the text of a plan back: what it says is then all of the plan."""

from __future__ import annotations

import json
from typing import Any

from autopar.files.plan_checks import from_json
from autopar.files.plan_text import RECORDS, TABLES, WHOLE
from autopar.nouns.plan import Plan
from autopar.nouns.text.lines import Cursor, Line, TextError, tree


def from_text(text: str) -> Plan:
    """The inverse of `autopar.files.plan_text.to_text`.

    Raises:
        TextError: a line that cannot be read.
        BadPlan: a value that no plan can have.
    """
    top = tree(text)
    if not top or top[0].text != "plan":
        raise TextError("line 1, column 1: expected 'plan'")
    if len(top) > 1:
        top[1].fail("the end of the text, or a line that is indented")
    data: dict[str, Any] = {"spreads": [], **{key: [] for key in RECORDS.values()}}
    for line in top[0].below:
        _read(line, data)
    return from_json(json.dumps(data))


def _read(line: Line, data: dict[str, Any]) -> None:
    cursor = Cursor(line)
    key = cursor.name("a decision")
    if key == "spread":
        data["spreads"].append(_spread(cursor))
        return
    if key in WHOLE:
        cursor.end()
        data[key] = {}
        for inside in line.below:
            _read(inside, data[key])
        return
    if line.below:
        line.below[0].fail("a line that is not deeper than the one above")
    if key in data and key not in RECORDS:
        line.fail(f"{key} once, not twice")
    if key in RECORDS:
        data[RECORDS[key]].append(_values(cursor))
    else:
        data[key] = cursor.value("a JSON value")
    cursor.end()


def _values(cursor: Cursor) -> dict[str, Any]:
    """``name=value name=value`` to the end of the line."""
    data: dict[str, Any] = {}
    while not cursor.done:
        key = cursor.name("the name of a value")
        cursor.expect("=")
        data[key] = cursor.value("a JSON value")
    return data


def _spread(cursor: Cursor) -> dict[str, Any]:
    cursor.expect("on")
    data: dict[str, Any] = {"mesh": _rest(cursor), **{table: {} for table in TABLES.values()}}
    for line in cursor.line.below:
        inside = Cursor(line)
        word = inside.name("an op, a shared copy or a parameter")
        if word not in TABLES:
            line.fail(" or ".join(TABLES))
        key = inside.name("its key")
        if inside.done:
            inside.fail("a strategy as in tp:n, or a sharding as in tp:S0")
        choice = _rest(inside)
        data[TABLES[word]][key] = int(choice) if word == "pieces" else choice
    return data


def _rest(cursor: Cursor) -> str:
    """Everything up to the end of the line."""
    text = cursor.line.text[cursor.at :]
    cursor.at = len(cursor.line.text)
    return text
