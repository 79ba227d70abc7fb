"""A `Plan` as text that a person reads, one line a decision::

    plan
      workload "../model.py:GPT"
      microbatches 2
      ...
      stage first="" device=0 spread=0 zero=2 recompute="none"
      spread on dp_shard=2 x tp=2
        op Block::up/linear tp:n
        shared Block::norm/layer_norm tp:S1
        parameter Block::up.weight tp:S0
        pieces Block::norm/layer_norm 4
        expert_pieces Block::mlp/experts 2
        beside Block::mlp/experts mlp.shared
      prediction
        step_time_s 0.12
        ...
      runner_up degrees={"dp_shard": 4} ...

Values are those of ``plan.json``, which programs read. That nothing is missing is tested: what
`tests.text.reading_plans` reads is the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from autopar.nouns.plan import Plan, as_data
from autopar.nouns.text.lines import INDENT, name, value

RECORDS: Mapping[str, str] = MappingProxyType({"stage": "stages", "runner_up": "runners_up"})
"""A line of each word is one record of a list of the plan."""
WHOLE = ("prediction", "fingerprints")
TABLES: Mapping[str, str] = MappingProxyType(
    {
        "op": "ops",
        "shared": "shared",
        "parameter": "parameters",
        "pieces": "pieces",
        "expert_pieces": "expert_pieces",
        "beside": "beside",
    }
)
"""A line of each word is one entry of a table of a spread."""


def to_text(plan: Plan) -> str:
    """The plan as text, with all that it holds."""
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
