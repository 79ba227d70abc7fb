"""Tables that have the same for every sample, as those of one sample that all of them share.

Positions that a model makes of sizes which every sample has (`same_numbers`) come out as one table
for the whole batch, built sample by sample. No rank or microbatch could make its own piece of it.
Where all samples have the same there, what reads the table gets the first sample's, expanded over
the batch: it stands in the trace already, or one call makes it.

For that all ops on nothing but constants and such sizes run once more, in order and with values, as
the forward did. Where a tensor is written after it is read, what reads it is left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.constant_values import is_computed, is_written, written_by
from autopar.torch_private.modes import FakeTensor, without_modes, without_torch_function
from autopar.torch_private.tensors import memory_of

_aten: Any = torch.ops.aten
MOST = 1 << 26
"""Numbers of all tables together."""
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function, its arguments, and those by name."""


@dataclass(frozen=True, slots=True)
class Shared:
    """``reader`` reads ``table``, which has along ``dim`` what ``one`` has for every sample: a node
    of the trace or what one call makes; None where neither is that."""

    reader: fx.Node
    table: fx.Node
    dim: int
    one: fx.Node | Made | None


@dataclass(frozen=True, slots=True)
class Single:
    """``reader`` makes something larger of ``node``, which is this number then."""

    reader: fx.Node
    node: fx.Node
    number: int | float | bool


def samples_shared(
    graph: fx.Graph, root: Any, batch: Mapping[fx.Node, torch.Tensor], samples: int
) -> None:
    """Rewrites ``graph``; ``batch``: entries with numbers that every sample has, of ``samples``."""
    if samples < 2 or not batch:
        return
    once_more = _OnceMore(graph, root, batch, samples)
    with without_modes(), without_torch_function(), torch.no_grad():
        places = list(once_more.places())
        rows = {n: v[:1].clone() for n, v in batch.items() if v.shape[:1] == (samples,)}
    for place in places:
        if isinstance(place, Single):
            _write_number(graph, place)
        else:
            _share(graph, place, samples)
    for entry, row in rows.items():
        readers = [n for n in entry.users if n in once_more.known and n.op == "call_function"]
        if readers and not is_written(entry):
            _write_out(graph, root, entry, row, readers)


@dataclass(slots=True)
class _OnceMore:
    """The ops of a trace that have values: ``known``, by the place in the trace that is reached."""

    graph: fx.Graph
    root: Any
    batch: Mapping[fx.Node, torch.Tensor]
    samples: int
    known: dict[fx.Node, Any] = field(default_factory=dict)
    places_of: dict[fx.Node, int] = field(default_factory=dict)
    last_written: dict[int, int] = field(default_factory=dict)
    left: int = MOST
    shared: dict[tuple[fx.Node, fx.Node], list[Shared]] = field(default_factory=dict)

    def places(self) -> Iterator[Shared | Single]:
        """What reads tables that all samples share, and numbers that follow from the entries."""
        for place, node in enumerate(self.graph.nodes):
            self.places_of[node] = place
            for written in written_by(node):
                for memory in _memories(written):
                    self.last_written[memory] = place
        follows = set(self.batch)
        for node in self.graph.nodes:
            if node in self.batch:
                self.known[node] = self.batch[node].clone()
            elif node.op == "get_attr":
                held = operator.attrgetter(str(node.target))(self.root)
                if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor):
                    self.known[node] = held.clone()
            elif self._has_values(node):
                own = follows.intersection(node.all_input_nodes)
                follows.update([node] if own else [])
                yield from self._computed(node, own)
            else:
                for given in node.all_input_nodes:
                    yield from self._shared(node, given)
                self._forget(written_by(node))

    def _has_values(self, node: fx.Node) -> bool:
        """Whether the op runs once more; there may be `MOST` numbers."""
        if not is_computed(node) or any(n not in self.known for n in node.all_input_nodes):
            return False
        made = node.meta["val"]
        several = made if isinstance(made, list | tuple) else [made]
        self.left -= sum(t.numel() for t in several)
        return self.left >= 0

    def _computed(self, node: fx.Node, own: Iterable[fx.Node]) -> Iterator[Single]:
        """Runs the op; numbers among ``own`` operands of which it makes something larger."""
        single = {n: self.known[n].item() for n in own if _rank(self.known[n]) == 0}
        target: Any = node.target
        args: Any = fx.node.map_arg(node.args, self.known.get)
        kwargs: Any = fx.node.map_arg(node.kwargs, self.known.get)
        self.known[node] = target(*args, **kwargs)
        for n, number in single.items():
            larger = 0 < _rank(self.known[node]) < _SEVERAL
            if larger and (self._is_settled(n, node) or not _is_view(node, n)):
                yield Single(node, n, number)

    def _shared(self, reader: fx.Node, table: fx.Node) -> list[Shared]:
        """What is put before ``reader`` for ``table``, or further up before what the table is made
        by, where one sample's is known; nothing where samples differ."""
        if (reader, table) not in self.shared:
            self.shared[reader, table] = self._shared_anew(reader, table)
        return self.shared[reader, table]

    def _shared_anew(self, reader: fx.Node, table: fx.Node) -> list[Shared]:
        value = self.known.get(table)
        if table.op != "call_function" or not isinstance(value, torch.Tensor):
            return []
        dim = next(_dims_alike(value, self.samples), None)
        if dim is None or not self._is_settled(table, reader):
            return []
        first = value.narrow(dim, 0, value.shape[dim] // self.samples)
        before = takewhile(lambda item: item[0] is not reader, self.known.items())
        made = (n for n, v in before if _is(v, first) and self._is_made(n, reader))
        one = next(made, None) or _made_at_once(first.flatten())
        if one is None:
            large = [n for n in table.all_input_nodes if _numbers(self.known[n]) >= self.samples]
            above = [self._shared(table, n) for n in large]
            if large and all(s and all(a.one is not None for a in s) for s in above):
                return [shared for several in above for shared in several]
        return [Shared(reader, table, dim, one)]

    def _is_made(self, node: fx.Node, reader: fx.Node) -> bool:
        return node.op == "call_function" and self._is_settled(node, reader)

    def _is_settled(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether nothing writes into the memory of ``node`` when ``reader`` reads it, or later."""
        last = max(self.last_written.get(memory, -1) for memory in _memories(node))
        return last < self.places_of[reader]

    def _forget(self, written: Iterable[fx.Node]) -> None:
        """What shares memory with what is written has no known values from here on."""
        values = (self.known.get(n) for n in written)
        lost = {memory_of(v) for v in values if isinstance(v, torch.Tensor)}
        for other, value in [*self.known.items()]:
            if isinstance(value, torch.Tensor) and memory_of(value) in lost:
                del self.known[other]


_SEVERAL = 99
"""Above any number of dims."""


def _rank(value: Any) -> int:
    """The dims of a tensor; `_SEVERAL` for several of them."""
    return value.dim() if isinstance(value, torch.Tensor) else _SEVERAL


def _memories(node: fx.Node) -> set[int]:
    """The memory of what a node makes."""
    made = node.meta.get("val")
    several = made if isinstance(made, list | tuple) else [made]
    return {memory_of(t) for t in several if isinstance(t, torch.Tensor)} or {0}


def _is_view(node: fx.Node, of: fx.Node) -> bool:
    return not _memories(node).isdisjoint(_memories(of))


def _is(value: Any, first: torch.Tensor) -> bool:
    """Whether a known value has these numbers, in whatever shape."""
    if not isinstance(value, torch.Tensor) or value.dtype != first.dtype:
        return False
    return value.numel() == first.numel() and torch.equal(value.reshape(first.shape), first)


def _made_at_once(first: torch.Tensor) -> Made | None:
    """How these are made if they are one number, or those from 0 up."""
    dtype = {"dtype": first.dtype}
    if bool((first == first[0]).all()):
        return _aten.full.default, ([len(first)], first[0].item()), dtype
    if torch.equal(first, torch.arange(len(first))):
        return _aten.arange.default, (len(first),), dtype
    return None


def _numbers(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _dims_alike(value: torch.Tensor, samples: int) -> Iterator[int]:
    """Dims along which ``value`` has the same for every sample, one behind the other."""
    for dim, size in enumerate(value.shape):
        if size and size % samples == 0:
            apart = value.movedim(dim, 0).reshape(samples, -1)
            if bool((apart == apart[0]).all()):
                yield dim


def _write_number(graph: fx.Graph, place: Single) -> None:
    fake = place.node.meta["val"]
    with graph.inserting_before(place.reader), fake.fake_mode:
        dtype = {"dtype": fake.dtype}
        made = graph.call_function(_aten.full.default, ([], place.number), dtype)
        made.meta["val"] = _aten.full.default([], place.number, **dtype)
    place.reader.replace_input_with(place.node, made)


def _share(graph: fx.Graph, shared: Shared, samples: int) -> None:
    """Puts the first sample's, expanded, in the place of the table where the reader reads it."""
    shape, dim = tuple(shared.table.meta["val"].shape), shared.dim
    each = shape[dim] // samples
    thin = (*shape[:dim], 1, each, *shape[dim + 1 :])
    steps: list[tuple[Any, ...]] = [
        (_aten.reshape.default, list(thin)),
        (_aten.expand.default, [*shape[:dim], samples, each, *shape[dim + 1 :]]),
        (_aten.reshape.default, list(shape)),
    ]
    made: Any = shared.one
    if made is None:
        made = shared.table
        steps.insert(0, (_aten.slice.Tensor, dim, 0, each))
    mode: Any = shared.table.meta["val"].fake_mode
    with graph.inserting_before(shared.reader), mode:
        if isinstance(made, tuple):
            target, given, named = made
            made = graph.call_function(target, given, named)
            made.meta["val"] = target(*given, **named)
        for target, *args in steps:
            fake = made.meta["val"]
            made = graph.call_function(target, (made, *args))
            made.meta["val"] = target(fake, *args)
    shared.reader.replace_input_with(shared.table, made)


def _write_out(
    graph: fx.Graph, root: Any, entry: fx.Node, every: torch.Tensor, readers: list[fx.Node]
) -> None:
    """Puts what ``every`` sample has into the graph, where ``readers`` read the entry."""
    name, fake = f"_every_{entry.name}", entry.meta["val"]
    root.register_buffer(name, every, persistent=False)
    with graph.inserting_before(readers[0]), fake.fake_mode:
        row = graph.get_attr(name)
        row.meta["val"] = fake[:1].clone()
        wide = graph.call_function(_aten.expand.default, (row, list(fake.shape)))
        wide.meta["val"] = _aten.expand.default(row.meta["val"], list(fake.shape))
    for reader in readers:
        if reader.target in (_aten.unbind.int, _aten.select.int) and not any(reader.args[1:2]):
            _read_one(graph, reader, row)
        else:
            reader.replace_input_with(entry, wide)


def _read_one(graph: fx.Graph, reader: fx.Node, row: fx.Node) -> None:
    """Every sample, taken by itself, is the only row of ``row``."""
    fake: Any = row.meta["val"]
    with graph.inserting_before(reader), fake.fake_mode:
        only = graph.call_function(_aten.select.int, (row, 0, 0))
        only.meta["val"] = _aten.select.int(fake, 0, 0)
    taken = [*reader.users] if reader.target is _aten.unbind.int else [reader]
    for each in taken:
        each.replace_all_uses_with(only)
