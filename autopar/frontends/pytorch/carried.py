"""Buffers that a forward updates: what they hold when it has ended is there for the next step.

Inside the forward a write is a new value, which later ops read. The last one becomes a ``carry``:
an op that hands it to the runtime, which writes it when the step has ended. So every microbatch
starts from the same buffer, recomputation from that of the forward, and no backward meets a tensor
that was written since.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from autopar.frontends.pytorch.calls import Kind, NotAlike
from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.lifter import Lifter

_COUNTER = "num_batches_tracked"


def carry(lifter: Lifter, buffer: Value, value: Value) -> None:
    """``buffer`` holds ``value`` when the forward has ended, unless it is written again."""
    if value.dtype != buffer.dtype:
        value = lifter.emit("cast", [value], value.shape, buffer.dtype, dtype=buffer.dtype)
    lifter.emit("carry", [buffer, value], buffer.shape, buffer.dtype)
    lifter.nodes[-1].grad = False


def settle(lifter: Lifter) -> None:
    """Of all that were carried leaves what the next step sees: the last write of every buffer.

    Dropped are also the counters of batch normalisation, which no forward here computes with, and
    what every forward makes anew: a buffer outside of the state that is written and never read.
    """
    _check_statistics(lifter.nodes)
    carried = [node for node in lifter.nodes if node.kind == "carry"]
    if not carried:
        return
    last = {(place, buffer): node for place, buffer, node in _writes(lifter.nodes)}
    kept = set(last.values()) - _counters(lifter.nodes)
    saved = {named.name for named in lifter.trace.named.values() if named.persistent}
    read = {v for node in lifter.nodes if node.kind != "carry" for v in node.inputs}
    kept = {n for n in kept if n.inputs[0].name in saved or n.inputs[0] in read}
    lifter.nodes[:] = _behind_makers(lifter.nodes, kept)


def _behind_makers(nodes: Sequence[Node], kept: Container[Node]) -> list[Node]:
    """``nodes`` without the carries that are not ``kept``, and those outside of layers behind what
    made their value: one that stands last of all would tie every stage of a pipeline to the last.
    """
    made: list[Node] = []
    behind: dict[Node | None, list[Node]] = {}
    makers: dict[Value, int] = {}
    inside = False
    for node in nodes:
        inside = (inside or node.kind == "enter") and node.kind != "leave"
        if node.kind != "carry" or (inside and node in kept):
            makers |= dict.fromkeys(node.outputs, len(made))
            made.append(node)
        elif node in kept:
            place = max((makers[v] for v in node.inputs if v in makers), default=-1)
            behind.setdefault(made[place] if place >= 0 else None, []).append(node)
    placed = behind.pop(None, [])
    for node in made:
        placed += node, *behind.get(node, ())
    return placed


def _check_statistics(nodes: Iterable[Node]) -> None:
    """Batch normalisation writes its statistics where it stands: nothing else may read them."""
    running = {
        v
        for node in nodes
        if node.kind == "batch_norm" and node.attrs["updates_buffers"]
        for v in node.inputs
        if v.role == "buffer"
    }
    for node in nodes if running else ():
        met = next((v for v in node.inputs if v in running), None)
        if node.kind != "batch_norm" and met is not None:
            raise MutationError(
                f"{node.source}: the forward computes with {met.name!r}, which a batch "
                "normalisation updates in the same forward: give the batch normalisation a copy "
                "(clone) that the module keeps as a buffer of its own, or compute the statistics "
                "from the batch"
            )


def _writes(nodes: Iterable[Node]) -> Iterator[tuple[int, Value, Node]]:
    """Every carry with its buffer and the stretch between the marks of layers where it stands."""
    stretch = 0
    for node in nodes:
        stretch += node.kind in ("enter", "leave")
        if node.kind == "carry":
            yield stretch, node.inputs[0], node


def _counters(nodes: Iterable[Node]) -> set[Node]:
    """Carries of a counter that grows by one with each batch normalisation and that nothing else
    reads: the calls that update the statistics say as much."""
    readers: dict[Value, list[Node]] = {}
    updating: dict[str, int] = {}
    counters: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
        if node.kind == "batch_norm" and node.attrs["updates_buffers"]:
            running = next(v for v in node.inputs if v.role == "buffer")
            owner = running.name.rpartition(".")[0]
            updating[owner] = updating.get(owner, 0) + 1
        if node.kind == "carry" and node.inputs[0].name.rpartition(".")[2] == _COUNTER:
            counters.setdefault(node.inputs[0], []).append(node)
    counting: set[Node] = set()
    for counter, writes in counters.items():
        if updating.get(counter.name.rpartition(".")[0]) == len(writes):
            chain = [counter, *(write.inputs[1] for write in writes)]
            if all(map(_only_counted, (readers.get(value, []) for value in chain))):
                counting.update(writes)
    return counting


def _only_counted(readers: Iterable[Node]) -> bool:
    return all(
        n.kind == "carry" or (n.kind == "add" and n.attrs.get("other") == 1) for n in readers
    )


def check_own(nodes: Iterable[Node], kind: Kind) -> None:
    """Raises `NotAlike` where the calls of a layer that repeats update one buffer in turn."""
    several = len(set(kind.paths)) < len(kind.paths)
    for node in nodes:
        if node.kind != "carry":
            continue
        name = node.inputs[0].name
        if several or not name.startswith(f"{kind.paths[0]}.") or name in kind.shared:
            raise NotAlike(kind.group, f"its calls update buffer {name!r} in turn")
