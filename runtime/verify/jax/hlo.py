"""The text of an HLO module as instructions, and how often its loops run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_OPERAND = re.compile(r"%?([A-Za-z_][\w.\-]*)(?:,|$)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_LOOP = re.compile(r"(condition|body)=%?([\w.\-]+)")
_GIVEN = re.compile(r"called_computations=\{([^}]*)\}")  # to a TPU's other cores
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INDEX = re.compile(r"index=(\d+)")
_SAME = {"copy", "bitcast", "convert", "copy-done", "optimization-barrier"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation. ``text``: all of it."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    text: str


@dataclass(slots=True)
class Computation:
    """Its instructions by name, in their order; ``root`` is what it returns."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: Instruction | None = None


@dataclass(frozen=True)
class Module:
    """Computations by name, and which of them is the program."""

    computations: Mapping[str, Computation]
    entry: str

    def called(self, one: Instruction) -> list[tuple[str, int | None]]:
        """What an instruction runs, and how often; None: nobody knows."""
        if one.opcode == "while":
            body = dict(_LOOP.findall(one.text))["body"]
            return [(body, self.trips(one))]
        if one.opcode in ("async-done", "async-update"):
            return []  # of what its start runs
        names = _CALLED.findall(one.rest)
        for several in _GIVEN.findall(one.rest):
            names += [name.strip(" %") for name in several.split(",") if name]
        for several, single in _BRANCHES.findall(one.rest):
            names += [name.strip(" %") for name in several.split(",") if name] or [single]
        return [(name, 1) for name in names]

    def slices_read(self, where: Computation, name: str) -> list[str] | None:
        """Types of the slices that all readers of ``name`` take, each an element's device chooses;
        None where anything reads it otherwise, or nothing does."""
        if where.root is not None and where.root.name == name:
            return None
        taken: list[str] = []
        for reader in where.instructions.values():
            for place, operand in enumerate(reader.operands):
                if operand != name:
                    continue
                more = self._slices_of(where, reader, place)
                if more is None:
                    return None
                taken += more
        return taken or None

    def _slices_of(self, where: Computation, reader: Instruction, place: int) -> list[str] | None:
        if reader.opcode == "dynamic-slice":
            return None if place else [reader.type]
        if reader.opcode in _SAME | {"get-tuple-element"}:
            return self.slices_read(where, reader.name)
        if reader.opcode != "fusion":
            return None
        body = self.computations[_CALLED.findall(reader.rest)[0]]
        inside = [
            one.name
            for one in body.instructions.values()
            if one.opcode == "parameter" and f" parameter({place})" in one.text
        ]
        return self.slices_read(body, inside[0])

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: as XLA has written at it, else from its counter."""
        if known := _TRIPS.search(loop.text):
            return int(known[1])
        parts = dict(_LOOP.findall(loop.text))
        condition, body = (self.computations.get(parts[p]) for p in ("condition", "body"))
        test = condition and condition.root
        if not (condition and body and test and test.opcode == "compare"):
            return None
        if "direction=LT" not in test.rest:
            return None
        place = _element(condition, test.operands[0])
        last = self._value(condition, test.operands[1], loop)
        if place is None or last is None:
            return None
        first = self._start(loop, place)
        step = _step(body, place)
        if first is None or not step:
            return None
        return max(0, -(-(last - first) // step))

    def _value(self, where: Computation, name: str, loop: Instruction) -> int | None:
        """An integer of a loop's condition: a constant, or one that the loop is handed."""
        own = _constant(where, name)
        place = _element(where, name)
        return self._start(loop, place) if own is None and place is not None else own

    def _start(self, loop: Instruction, place: int) -> int | None:
        """What a loop's state has at ``place`` when it begins."""
        where = self._home.get(loop.name)
        given = where and where.instructions.get(loop.operands[0])
        if not where or not given or given.opcode != "tuple":
            return None
        return _constant(where, given.operands[place])

    @cached_property
    def _home(self) -> dict[str, Computation]:
        return {name: where for where in self.computations.values() for name in where.instructions}


def parse(text: str) -> Module:
    """The module that ``text`` is, as `Compiled.as_text` gives it."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(""), ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], Computation(header[2]))
            entry = header[2] if header[1] else entry
            continue
        match = _LINE.match(line)
        if match:
            inside, rest = _closed(match["rest"])
            names = tuple(_OPERAND.findall(re.sub(r"/\*.*?\*/|\s", "", inside)))
            one = Instruction(match["name"], match["type"], match["opcode"], names, rest, line)
            current.instructions[one.name] = one
            current.root = one if match["root"] else current.root
    return Module(computations, entry)


def _closed(text: str) -> tuple[str, str]:
    """What stands before the bracket that closes, and behind it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:place], text[place + 1 :]
    return text, ""


def _plain(where: Computation, name: str) -> Instruction | None:
    """An instruction, or the one of which it is a copy."""
    one = where.instructions.get(name)
    while one is not None and one.opcode in _SAME and one.operands:
        one = where.instructions.get(one.operands[0])
    return one


def _constant(where: Computation, name: str) -> int | None:
    one = _plain(where, name)
    if one is None or one.opcode != "constant":
        return None
    number = re.search(r"constant\((-?\d+)\)", one.text)
    return int(number[1]) if number else None


def _element(where: Computation, name: str) -> int | None:
    """Which element of the computation's parameter it is."""
    one = _plain(where, name)
    index = _INDEX.search(one.rest) if one and one.opcode == "get-tuple-element" else None
    return int(index[1]) if index else None


def _step(body: Computation, place: int) -> int | None:
    """What a loop's body adds to the element ``place`` of its state."""
    if body.root is None or body.root.opcode != "tuple":
        return None
    one = _plain(body, body.root.operands[place])
    if one is None or one.opcode != "add" or _element(body, one.operands[0]) != place:
        return None
    return _constant(body, one.operands[1])
