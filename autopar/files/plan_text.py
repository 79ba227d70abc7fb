"""A `Plan` as text that a person reads, one line a decision, and back::

    plan
      workload "../model.py:GPT"
      microbatches 2
      ...
      stage first="" device=0 spread=0 zero=2 recompute="none"
      spread on dp_shard=2 x tp=2
        op Block::up/linear tp:n
        shared Block::norm/layer_norm tp:S1
        parameter Block::up.weight tp:S0
      prediction
        step_time_s 0.12
        ...
      runner_up degrees={"dp_shard": 4} ...

Values are those of ``plan.json``, which programs read; what is wrong with one is said by its key,
as `autopar.files.plan_checks` says it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from autopar.files.plan_checks import from_json
from autopar.nouns.plan import Plan, as_data
from autopar.nouns.text.lines import INDENT, Cursor, Line, TextError, name, tree, value

RECORDS: Mapping[str, str] = MappingProxyType({"stage": "stages", "runner_up": "runners_up"})
"""A line of each word is one record of a list of the plan."""
WHOLE = ("prediction", "fingerprints")
TABLES: Mapping[str, str] = MappingProxyType(
    {"op": "ops", "shared": "shared", "parameter": "parameters"}
)
"""A line of each word is one entry of a table of a spread."""


def to_text(plan: Plan) -> str:
    """The plan as text; `from_text` reads it back."""
    return "\n".join(("plan", *(INDENT + line for line in _lines(plan))))


def _lines(plan: Plan) -> Iterator[str]:
    data = as_data(plan)
    for key, given in data.items():
        if key not in (*RECORDS.values(), *WHOLE, "spreads"):
            yield f"{key} {value(given)}"
    yield from (f"stage {_record(stage)}" for stage in data["stages"])
    for spread in plan.spreads:
        yield f"spread on {spread.mesh}"
        for word, table in TABLES.items():
            for key, choice in getattr(spread, table).items():
                yield f"{INDENT}{word} {name(key)} {choice}"
    for word in WHOLE:
        yield word
        yield from (f"{INDENT}{key} {value(given)}" for key, given in data[word].items())
    yield from (f"runner_up {_record(lost)}" for lost in data["runners_up"])


def _record(data: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value(given)}" for key, given in data.items())


def from_text(text: str) -> Plan:
    """The inverse of `to_text`.

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
    data: dict[str, Any] = {"mesh": cursor.rest(), **{table: {} for table in TABLES.values()}}
    for line in cursor.line.below:
        inside = Cursor(line)
        word = inside.name("an op, a shared copy or a parameter")
        if word not in TABLES:
            line.fail(" or ".join(TABLES))
        key = inside.name("its key")
        if inside.done:
            inside.fail("a strategy as in tp:n, or a sharding as in tp:S0")
        data[TABLES[word]][key] = inside.rest()
    return data
