"""What is wrong with a file that a person wrote or edited: key path, value, what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError

_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list ([...], or one `- ...` a line)",
    "tuple_type": "a list",
    "dict_type": "keys with values (key: value)",
    "dataclass_type": "keys with values (key: value)",
    "model_type": "keys with values (key: value)",
    "model_attributes_type": "keys with values (key: value)",
}

_MOST = 12
"""Findings that are told of one file."""
_LONGEST = 100
_SHORT = reprlib.Repr()
"""How values are shown: aliases of YAML make lists of lists that have no end."""
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 4, 4
_SHORT.maxstring = _SHORT.maxother = 80


def sentences(
    error: ValidationError, model: type, examples: Mapping[str, str], within: int = 0
) -> list[str]:
    """One sentence for each finding.

    model:    what the file was read as, a pydantic model or a dataclass; its fields are the known
              keys.
    examples: for keys whose value is a figure with a unit, how to write one.
    within:   how deep what was validated holds the model.
    """
    findings = error.errors(include_url=False)
    made = [
        _sentence({**finding, "loc": finding["loc"][within:]}, model, examples)
        for finding in findings[:_MOST]
    ]
    more = len(findings) - len(made)
    return [*made, f"and {more} more"] if more else made


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                break  # the base class refuses it
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def unique_yaml(text: str) -> Any:
    """What ``text`` says, tags of YAML's standard alone. Raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except RecursionError:
        raise yaml.YAMLError("brackets within brackets, too deep to be read") from None


def yaml_sentence(error: yaml.YAMLError) -> str:
    """Where a text stops being YAML, in one line."""
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"not YAML{where}: {getattr(error, 'problem', None) or error}"


def _sentence(finding: Any, model: type, examples: Mapping[str, str]) -> str:
    place, kind = finding["loc"], finding["type"]
    path, given, limits = _path(place), finding["input"], finding.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{path}: unknown key{_meant(str(place[-1]), _known_keys(model, place[:-1]))}"
    if kind == "missing":
        return f"{path}: missing{_written_like(place, examples)}"
    if kind == "string_type" and isinstance(given, (int, float)):
        like = _written_like(place, examples)
        return (
            f"{path}: {_shown(given)} has no unit{like}"
            if like
            else f"{path}: {_shown(given)} is no text"
        )
    if kind == "literal_error":
        word = given[:_LONGEST] if isinstance(given, str) else ""
        meant = _meant(word, limits["expected"].replace("'", "").replace(" or ", ", "))
        return f"{path}: {_shown(given)} is none of {limits['expected']}{meant.partition(';')[0]}"
    if kind == "too_short":
        return f"{path}: empty; give at least {limits['min_length']}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{path}: {_shown(given)} must be {words} {limits[name]:g}"
    wanted = _KINDS.get(kind, f"text{_written_like(place, examples)}")
    return f"{path}: {_shown(given)} is not {wanted}"


def _shown(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _path(place: tuple[int | str, ...]) -> str:
    """``levels[0].bandwidth``"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _written_like(place: tuple[int | str, ...], examples: Mapping[str, str]) -> str:
    known = [examples[str(part)] for part in reversed(place) if str(part) in examples]
    return f"; write it like {known[0]}" if known else ""


def _meant(word: str, known: list[str] | str) -> str:
    names = known.split(", ") if isinstance(known, str) else known
    near = difflib.get_close_matches(word, names, 1)
    if near:
        return f", did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if names else ""


def _known_keys(model: type, place: tuple[int | str, ...]) -> list[str]:
    """The keys that ``model`` knows at ``place``, through lists and mappings of models."""
    now: Any = model
    for part in place:
        kind = get_origin(now)
        if kind is tuple:
            now = get_args(now)[0]
        elif kind in (list, dict, Mapping):
            now = get_args(now)[-1]
        else:
            now = _fields(now).get(str(part))
    return list(_fields(now))


def _fields(model: Any) -> dict[str, Any]:
    """Key -> type of its value."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    if isinstance(model, type) and dataclasses.is_dataclass(model):
        return get_type_hints(model)
    return {}
