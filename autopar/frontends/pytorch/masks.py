"""What facts about indices make simpler: causal masks, position ids, lookups that only spread."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.frontends.pytorch.documents import lift_documents
from autopar.frontends.pytorch.index_facts import Facts, find_facts
from autopar.frontends.pytorch.ir import Links, Node, Shape, Value, final, replace
from autopar.frontends.pytorch.mask_forms import form_of, has_mask, seen
from autopar.frontends.pytorch.program import Body, Program
from autopar.frontends.pytorch.unfused import lift_attention
from autopar.frontends.shared.facts import Affine, Choice, Fact, Test

Emit = Callable[..., Value]


def simplify_masks(program: Program) -> None:
    """Attention loses masks that say causal, a window or nothing; other index work gets short."""
    facts = find_facts(program.nodes)
    entering = {n: _entry_facts(program, body, facts) for n, body in program.bodies.items()}
    inside = {n: find_facts(body.nodes, entering[n]) for n, body in program.bodies.items()}
    lift_attention(program.nodes, {program.result}, facts)
    for number, body in program.bodies.items():
        lift_attention(body.nodes, set(body.exits), inside[number])
    _plain_lookups(program.nodes, facts)
    program.nodes = _row_lookups(program.nodes, facts)
    lift_documents(program, facts, inside)
    for number, body in program.bodies.items():
        inner = inside[number]
        _plain_lookups(body.nodes, inner)
        body.nodes = _row_lookups(body.nodes, inner)
        _mask_attention(body.nodes, inner)
        body.nodes = _rebuilt(body.nodes, inner, set(body.exits), set(entering[number]))
    _mask_attention(program.nodes, facts)
    program.nodes = _rebuilt(program.nodes, facts, {program.result}, set())
    _hand_in_unspread(program)


def _entry_facts(program: Program, body: Body, facts: Facts) -> dict[Value, Fact]:
    """Facts that hold for an entry in every call."""
    known: dict[Value, Fact] = {}
    for place, entry in enumerate(body.entries):
        entering = {facts.get(call.inputs[place]) for call in program.calls(body.number)}
        fact = next(iter(entering))
        if len(entering) == 1 and fact is not None:
            known[entry] = fact
    return known


def _mask_attention(nodes: list[Node], facts: Facts) -> None:
    for node in nodes:
        if not has_mask(node) or node.attrs["causal"]:
            continue
        fact = facts.get(node.inputs[3])
        test = seen(fact) if isinstance(fact, Choice) else fact
        form = form_of(test) if isinstance(test, Test) else None
        queries, keys = node.inputs[0].shape[2], node.inputs[1].shape[2]
        if form is not None and (queries == keys or not dict(form)["causal"]):
            del node.inputs[3]
            node.attrs = {**node.attrs, **dict(form)}


def _plain_lookups(nodes: list[Node], facts: Facts) -> None:
    """``x[arange[:, None], arange[None, :]]`` is x with more dims."""
    for node in nodes:
        if node.kind != "index" or node.output in facts:
            continue
        x, places = node.inputs[0], [facts.get(v) for v in node.inputs[1:]]
        shape = node.output.shape
        if node.attrs["dims"] != tuple(range(len(x.shape))):
            continue
        targets = [_one_dim(p, shape, n) for p, n in zip(places, x.shape, strict=True)]
        if None in targets or sorted(set(targets), key=str) != sorted(targets, key=str):
            continue
        order = [t for t in targets if t is not None]
        if order != sorted(order):
            continue
        spread = tuple(n if d in order else 1 for d, n in enumerate(shape))
        if spread != shape:
            continue
        node.kind, node.inputs, node.attrs = "reshape", [x], {"shape": shape}


def _row_lookups(nodes: list[Node], facts: Facts) -> list[Node]:
    """``x[arange(b), ids]`` takes one of each row: a gather, which keeps the rows apart."""
    out: list[Node] = []
    for node in nodes:
        if node.kind == "index" and node.attrs["dims"] == (0, 1) and node.output not in facts:
            x, rows, ids = node.inputs
            once = _one_dim(facts.get(rows), ids.shape, x.shape[0]) == 0
            if once and rows.shape == ids.shape == x.shape[:1]:
                out += _gathered(node, nodes)
                continue
        out.append(node)
    return out


def _emitter(node: Node, made: list[Node]) -> Emit:
    """Appends ops that stand in the place of ``node``."""

    def emit(kind: str, inputs: list[Value], shape: Shape, dtype: str, /, **attrs: object) -> Value:
        new = Node(kind, inputs, [Value(shape, dtype)], attrs, node.source, node.grad)
        made.append(new)
        return new.output

    return emit


def _gathered(node: Node, nodes: list[Node]) -> list[Node]:
    x, _, ids = node.inputs
    made: list[Node] = []
    emit = _emitter(node, made)
    maker = Links(nodes).made_by(ids, "argmax")
    if maker is None:  # an index may count from the end, a gather's may not
        ids = emit("remainder", [ids], ids.shape, ids.dtype, other=x.shape[1])
    rows, rest = x.shape[0], x.shape[2:]
    thin, spread = (rows, 1, *(1 for _ in rest)), (rows, 1, *rest)
    ids = emit("reshape", [ids], thin, ids.dtype, shape=thin)
    if thin != spread:
        ids = emit("expand", [ids], spread, ids.dtype, shape=spread)
    gathered = emit("gather", [x, ids], spread, node.output.dtype, dim=1)
    last = Node("reshape", [gathered], node.outputs, {"shape": node.output.shape}, node.source)
    last.grad = node.grad
    return [*made, last]


def _one_dim(fact: Fact | None, shape: Shape, size: int) -> int | None:
    """The result dim that ``fact`` counts from 0 in steps of 1, if it has the extent ``size``."""
    if not isinstance(fact, Affine) or fact.const != 0:
        return None
    extra = len(shape) - len(fact.shape)
    counting = [d + extra for d, c in enumerate(fact.coefficients) if c]
    if len(counting) != 1 or fact.coefficients[counting[0] - extra] != 1:
        return None
    return counting[0] if shape[counting[0]] == size else None


def _rebuilt(nodes: list[Node], facts: Facts, results: set[Value], given: set[Value]) -> list[Node]:
    """Index tensors that other ops read, made again in as few ops as their formula needs."""
    links = Links(nodes, results)
    out: list[Node] = []
    swap: dict[Value, Value] = {}
    for node in nodes:
        out.append(node)
        if len(node.outputs) != 1 or node.output in given:
            continue
        value = node.output
        fact = facts.get(value)
        readers = links.readers.get(value, [])
        needed = value in results or any(
            not set(r.outputs) <= facts.keys() or r.kind == "call" for r in readers
        )
        if fact is None or not needed or not node.inputs or value in results:
            continue
        made = _make(fact, value, node)
        if made:
            out += made
            swap[value] = made[-1].output
    for node in out:
        if not any(v in swap.values() for v in node.outputs):
            node.inputs = [final(swap, v) for v in node.inputs]
    return out


def _make(fact: Fact, value: Value, node: Node) -> list[Node]:
    """Ops that compute ``fact``; none where its formula has no short form."""
    made: list[Node] = []
    emit = _emitter(node, made)

    def spread(small: Value) -> None:
        if small.shape != value.shape:
            emit("expand", [small], value.shape, small.dtype, shape=value.shape)

    if isinstance(fact, Affine):
        counting = [d for d, c in enumerate(fact.coefficients) if c]
        if len(counting) > 1:
            return []
        if not counting:
            emit("full", [], value.shape, value.dtype, shape=value.shape, value=fact.const,
                 dtype=value.dtype)  # fmt: skip
            return made
        dim = counting[0]
        step, size = fact.coefficients[dim], value.shape[dim]
        line = emit("arange", [], (size,), value.dtype, start=fact.const,
                    stop=fact.const + step * size, step=step, dtype=value.dtype)  # fmt: skip
        shape = tuple(n if d == dim else 1 for d, n in enumerate(value.shape))
        if shape != (size,):
            line = emit("reshape", [line], shape, value.dtype, shape=shape)
        spread(line)
        return made
    if isinstance(fact, Choice):
        if fact.test.always or fact.test.never:
            number = fact.inside if fact.test.always else fact.outside
            emit("full", [], value.shape, value.dtype, shape=value.shape, value=number,
                 dtype=value.dtype)  # fmt: skip
            return made
        holds = _comparisons(fact.test, value.shape, emit)
        numbers = (fact.inside, fact.outside)
        if holds is not None and value.is_float and all(map(_is_float32, numbers)):
            chosen = emit("where", [holds], holds.shape, "float32", a=fact.inside, b=fact.outside)
            if value.dtype != "float32":
                chosen = emit("cast", [chosen], holds.shape, value.dtype, dtype=value.dtype)
            spread(chosen)
            return made
        return []
    if fact.always or fact.never:
        emit("full", [], value.shape, "bool", shape=value.shape, value=fact.always, dtype="bool")
        return made
    holds = _comparisons(fact, value.shape, emit)
    if holds is None:
        return []
    spread(holds)
    return made


def _is_float32(number: float) -> bool:
    """Whether a choice between numbers, which is one of float32, keeps this one as it is."""
    with np.errstate(over="ignore"):
        return math.isnan(number) or float(np.float32(number)) == number


def _comparisons(fact: Test, full: Shape, emit: Emit) -> Value | None:
    """``fact`` as ``row >= column`` comparisons, not spread to dims it does not mention."""
    whole: Value | None = None
    for coefficients, const in sorted(fact.least):
        counting = [d for d, c in enumerate(coefficients) if c]
        if len(counting) != 2 or sorted(coefficients[d] for d in counting) != [-1, 1]:
            return None
        ends = []
        for dim in sorted(counting, key=lambda d: -coefficients[d]):
            start = const if coefficients[dim] == 1 else 0
            line = emit("arange", [], (full[dim],), "int64", start=start, stop=start + full[dim],
                        step=1, dtype="int64")  # fmt: skip
            shape = tuple(n if d == dim else 1 for d, n in enumerate(full))
            ends.append(emit("reshape", [line], shape, "int64", shape=shape))
        both = tuple(n if d in counting else 1 for d, n in enumerate(full))
        holds = emit("ge", ends, both, "bool")
        if whole is None:
            whole = holds
        else:
            shape = tuple(max(a, b) for a, b in zip(whole.shape, holds.shape, strict=True))
            whole = emit("and", [whole, holds], shape, "bool")
    return whole


def _hand_in_unspread(program: Program) -> None:
    """A mask that is only spread over the batch goes into attention, and into blocks, as it is."""
    scopes = [program.nodes, *(b.nodes for b in program.bodies.values())]
    for nodes in scopes:
        links = Links(nodes)
        for node in nodes:
            if has_mask(node):
                node.inputs[3] = _unspread(links, node.inputs[3])
    links = Links(program.nodes)
    for body in program.bodies.values():
        inner = Links(body.nodes, body.exits)
        calls = program.calls(body.number)
        for place, entry in enumerate(body.entries):
            readers = inner.readers.get(entry, [])
            only_masks = readers and all(
                has_mask(r) and entry is r.inputs[3] and r.inputs.count(entry) == 1 for r in readers
            )
            if not only_masks or entry in inner.results:
                continue
            sources = [_unspread(links, c.inputs[place]) for c in calls]
            if len({s.shape for s in sources}) == 1 and sources[0].shape != entry.shape:
                fresh = Value(sources[0].shape, entry.dtype, entry.role)
                replace(body.nodes, {entry: fresh})
                body.entries[place] = fresh
                for call, source in zip(calls, sources, strict=True):
                    call.inputs[place] = source


def _unspread(links: Links, mask: Value) -> Value:
    node = links.made_by(mask, "expand")
    same_rank = node is not None and len(node.inputs[0].shape) == len(mask.shape)
    return node.inputs[0] if node is not None and same_rank else mask
