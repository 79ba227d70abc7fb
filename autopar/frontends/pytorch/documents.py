"""Attention of packed documents: masks that show each row its own document's columns.

Such a mask compares a number of each row with one of each column, and holds what says causal or a
window beside that. `~transformers` counts documents by where positions jump, and then compares
positions: within a document that is to compare places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.frontends.pytorch.index_facts import Facts
from autopar.frontends.pytorch.ir import Links, Node, Shape, Value, replace
from autopar.frontends.pytorch.mask_forms import HUGE, Form, form_of, has_mask
from autopar.frontends.pytorch.program import Program
from autopar.frontends.shared.facts import Choice, Fact, Test
from autopar.nouns.graph import Graph, Op, with_ops

Scope = tuple[list[Node], Links, Facts]


@dataclass(frozen=True, slots=True)
class Packed:
    """``numbers`` [b or 1, s] of rows and columns, as far as their batch and tokens go; ``test``,
    of places [s, t], holds too."""

    numbers: Value
    test: Test


def lift_documents(program: Program, facts: Facts, inside: Mapping[int, Facts]) -> None:
    """Attention is given the documents' numbers in the place of masks made of them.

    facts: of the top level; ``inside``: of the bodies, by number.
    """
    outside: Scope = (program.nodes, Links(program.nodes, {program.result}), facts)
    _lift(outside, set())
    for body in program.bodies.values():
        scope: Scope = (body.nodes, Links(body.nodes, body.exits), inside[body.number])
        _lift(scope, set(body.entries))
        calls = program.calls(body.number)
        for place, entry in enumerate(body.entries):
            readers = scope[1].readers.get(entry, [])
            if (
                not readers
                or entry in scope[1].results
                or not all(_open(r, entry) for r in readers)
            ):
                continue
            packed = [_packed(outside, call.inputs[place]) for call in calls]
            forms = {None if p is None else _form(p, readers[0]) for p in packed}
            (form,) = forms if len(forms) == 1 else (None,)
            if form is None:
                continue
            numbers = [_numbers(outside, p.numbers) for p in packed if p is not None]
            if len({n.shape for n in numbers}) != 1:
                continue
            fresh = Value(numbers[0].shape, numbers[0].dtype, entry.role)
            replace(body.nodes, {entry: fresh})
            body.entries[place] = fresh
            for call, number in zip(calls, numbers, strict=True):
                call.inputs[place] = number
            for reader in readers:
                _give(reader, fresh, form)


def _open(reader: Node, mask: Value) -> bool:
    """Whether it is attention that numbers may be given to in the place of ``mask``."""
    return (
        has_mask(reader)
        and reader.inputs[3] is mask
        and reader.inputs.count(mask) == 1
        and not reader.attrs["causal"]
        and not reader.attrs["dropout_p"]
        and reader.inputs[0].shape[2] == reader.inputs[1].shape[2]
    )


def _lift(scope: Scope, given: set[Value]) -> None:
    for node in list(scope[0]):
        if not has_mask(node) or not _open(node, node.inputs[3]) or node.inputs[3] in given:
            continue
        packed = _packed(scope, node.inputs[3])
        form = None if packed is None else _form(packed, node)
        if packed is not None and form is not None:
            _give(node, _numbers(scope, packed.numbers), form)


def _give(attention: Node, numbers: Value, form: Form) -> None:
    attention.inputs[3:4] = [numbers, numbers]
    attention.attrs = {**attention.attrs, "documents": True, **dict(form)}


def _form(packed: Packed, attention: Node) -> Form | None:
    rows, batch = attention.inputs[0].shape[2], attention.inputs[0].shape[0]
    if packed.test.shape != (rows, rows) or _line(packed.numbers.shape)[0] not in (
        (rows,),
        (batch, rows),
    ):
        return None
    return form_of(packed.test)


def _packed(scope: Scope, mask: Value) -> Packed | None:
    """What ``mask`` says, if no more than that; none where it says nothing of documents."""
    if len(mask.shape) != 4 and not _of_all_samples(mask):
        return None
    mask = _through(scope[1], mask)
    if len(mask.shape) < 2 or mask.shape[-1] < 2 or not _by_sample(mask):
        return None
    kept = _kept(scope, mask)
    numbers: list[Value] = []
    ordered: list[Value] = []
    places: list[Test] = []
    for term in () if kept is None else _terms(scope[1], kept):
        fact = scope[2].get(term)
        pair = None if isinstance(fact, Test) else _compared(scope[1], term, mask.shape)
        if isinstance(fact, Test):
            at = _of_places(fact, mask.shape)
            if at is None:
                return None
            places.append(at)
        elif pair is None:
            return None
        elif pair[0] == "eq":
            numbers.append(pair[1])
        else:
            ordered.append(pair[1])
    if len(numbers) != 1 or not all(_counts_jumps(scope[1], numbers[0], p) for p in ordered):
        return None
    test = Test(mask.shape[-2:], frozenset())
    least = {e for at in places for e in at.least} | ({((1, -1), 0)} if ordered else set())
    never = any(at.never for at in places)
    return None if never else Packed(numbers[0], Test(test.shape, frozenset(least)))


def _kept(scope: Scope, mask: Value) -> Value | None:
    """The boolean tensor that is true where ``mask`` shows a column."""
    _, links, facts = scope
    mask = _through(links, mask)
    if mask.dtype == "bool":
        return mask
    node = links.made_by(mask, "where", "masked_fill")
    if node is None:
        return None
    if node.kind == "where":
        numbers = [node.attrs.get(name) for name in "ab"]
        rest = iter(node.inputs[1:])
        shown, hidden = (_number(facts.get(next(rest))) if n is None else float(n) for n in numbers)
        return node.inputs[0] if shown == 0 and hidden is not None and hidden <= HUGE else None
    base, condition = node.inputs
    inverse = links.made_by(condition, "not")
    if inverse is None or _number(facts.get(base)) != 0 or node.attrs["value"] > HUGE:
        return None
    return inverse.inputs[0]


def _number(fact: Fact | None) -> float | None:
    return fact.inside if isinstance(fact, Choice) and fact.test.always else None


def _terms(links: Links, value: Value) -> Iterator[Value]:
    """What ``value`` is the conjunction of."""
    value = _through(links, value)
    both = links.made_by(value, "and")
    sides = [] if both is None else both.inputs
    if len(sides) != 2 or not all(_stands_in(side, value) for side in sides):
        yield value
        return
    for side in sides:
        yield from _terms(links, side)


def _through(links: Links, value: Value) -> Value:
    """What is only spread, or has more dims of size one behind that of samples, in ``value``."""
    node = links.made_by(value, "reshape", "expand")
    while node is not None:
        inside = node.inputs[0]
        same = inside.shape[-2:] == value.shape[-2:] and _by_sample(inside)
        if node.kind == "expand":
            same = same and _stands_in(inside, value)
        else:
            sizes = [_line(v.shape[:-2])[0] for v in (inside, value)]
            same = same and _by_sample(value) and sizes[0] == sizes[1]
        if not same:
            break
        value = inside
        node = links.made_by(value, "reshape", "expand")
    return value


def _of_all_samples(value: Value) -> bool:
    return all(n == 1 for n in value.shape[:-2])


def _by_sample(value: Value) -> bool:
    """Whether rows and columns stand behind samples alone."""
    return all(n == 1 for n in value.shape[1:-2])


def _stands_in(side: Value, whole: Value) -> bool:
    """Whether samples of ``side`` are those of ``whole``, to whose dims it is aligned at the right:
    with fewer dims they would stand where heads do."""
    return len(side.shape) == len(whole.shape) or _of_all_samples(side)


def _of_places(fact: Test, shape: Shape) -> Test | None:
    """``fact`` of rows and columns alone."""
    if fact.always or fact.never:
        return Test(shape[-2:], frozenset(), fact.never)
    if fact.shape[-2:] != shape[-2:] or any(any(c[:-2]) for c, _ in fact.least):
        return None
    return Test(shape[-2:], frozenset((c[-2:], k) for c, k in fact.least))


def _compared(links: Links, term: Value, shape: Shape) -> tuple[str, Value] | None:
    """``eq`` of numbers, or ``le`` of a column's to its row's, with what both are a view of."""
    node = links.made_by(term, "eq", "le", "ge")
    if node is None or len(node.inputs) != 2 or term.shape[-2:] != shape[-2:]:
        return None
    if not all(len(v.shape) == len(term.shape) for v in node.inputs) or not _by_sample(term):
        return None
    if any("int" not in v.dtype for v in node.inputs):
        return None
    sides = [_line(v.shape) for v in node.inputs]
    bases = [_base(links, v) for v in node.inputs]
    ends = [
        where[-1] - len(v.shape) if where else 0
        for (_, where), v in zip(sides, node.inputs, strict=True)
    ]
    if bases[0] is not bases[1] or sorted(ends) != [-2, -1]:
        return None
    if any(len(sizes) > 2 or (len(sizes) == 2 and where[0] != 0) for sizes, where in sides):
        return None
    if node.kind == "eq":
        return "eq", bases[0]
    column_first = ends[0] == -1
    return ("le", bases[0]) if column_first == (node.kind == "le") else None


def _line(shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes other than one, and their dims."""
    where = tuple(d for d, n in enumerate(shape) if n != 1)
    return tuple(shape[d] for d in where), where


def _base(links: Links, value: Value) -> Value:
    """What ``value`` has other dims of size one of."""
    node = links.made_by(value, "reshape")
    while node is not None and _line(node.inputs[0].shape)[0] == _line(value.shape)[0]:
        value = node.inputs[0]
        node = links.made_by(value, "reshape")
    return value


def _counts_jumps(links: Links, numbers: Value, positions: Value) -> bool:
    """Whether ``numbers`` go up wherever ``positions`` are not one more than the ones before: they
    then rise by one from place to place within a number."""
    count = links.made_by(numbers, "cumsum")
    jump = None if count is None else links.made_by(count.inputs[0], "ne")
    if jump is None or jump.attrs.get("other") != 1 or len(jump.inputs) != 1:
        return False
    step = links.made_by(jump.inputs[0], "aten::diff")
    called = {} if step is None else step.attrs.get("torch", {})
    return (
        step is not None
        and count is not None
        and count.attrs["dim"] == len(numbers.shape) - 1
        and _base(links, step.inputs[0]) is positions
        and called.get("args") == ("%0", 1, -1, "%1")
        and not called.get("kwargs")
        and step.inputs[1].shape[-1:] == (1,)
    )


def _numbers(scope: Scope, numbers: Value) -> Value:
    """As [b or 1, s], by a reshape where they are not."""
    sizes, _ = _line(numbers.shape)
    shape = sizes if len(sizes) == 2 else (1, *sizes)
    if numbers.shape == shape:
        return numbers
    nodes, links, _ = scope
    maker = links.maker.get(numbers)
    made = Value(shape, numbers.dtype)
    node = Node("reshape", [numbers], [made], {"shape": shape})
    nodes.insert(nodes.index(maker) + 1 if maker is not None else 0, node)
    return made


def with_length(graph: Graph, tokens: float) -> Graph:
    """``graph`` whose attention of documents is priced for such of so many ``tokens``."""

    def of(part: Graph, op: Op) -> Op:
        if not op.attrs.get("documents"):
            return op
        return dataclasses.replace(op, attrs={**op.attrs, "document_tokens": float(tokens)})

    return with_ops(graph, of)
