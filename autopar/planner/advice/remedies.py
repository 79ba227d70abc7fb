"""Where nothing fits: which change would, found by planning again with it.

Tried in the order of what they cost: giving up a pin that leaves the pinned degrees as they are
(recomputation, ZeRO, microbatch, offload, schedule), then all of those; a degree, which is said
beside them where it is faster; then all pins; then a smaller batch where it cannot be cut into
microbatches; then devices that there are not: twice as many and so on, or as many of the next
larger kind. Each is searched in full, so what is named has been priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.cost_models.catalogue import catalogue
from autopar.cost_models.physics import Impossible
from autopar.nouns.axes import PIPELINE, SHARD
from autopar.nouns.errors import DoesNotFit
from autopar.nouns.layout import LayoutError, Pins, pairs_text
from autopar.nouns.mesh import Mesh
from autopar.planner.ask.pins import DEGREES
from autopar.planner.ask.question import Answer, Outcome, Question
from autopar.planner.ask.resized import resized
from autopar.planner.ask.sentences import layout_text, size_text
from autopar.planner.search.layouts import Progress, search_plan
from autopar.planner.solve.standings import NothingFits
from autopar.pricing.state import StateSharding
from autopar.pricing.units.unit import Kind
from autopar.pricing.utilization import peak_time_s

FACTORS = (2, 4, 8, 16, 32, 64)
"""How many times the devices are tried."""
SMALLER = "a smaller batch"


def search_or_advise(question: Question, progress: Progress = lambda _: None) -> Outcome:
    """The fastest layout that fits.

    Raises:
        DoesNotFit: nothing does; says what is short, by how much, and the cheapest change.
        LayoutError: the batch, the pinned degrees and the devices do not divide.
    """
    try:
        return search_plan(question, progress)
    except NothingFits as error:
        progress("nothing fits; looking for the cheapest change that would")
        raise DoesNotFit(f"{error} {_advice(question, error.tightest)}") from None


@dataclass(frozen=True, slots=True)
class _Change:
    words: str
    question: Question


def _advice(question: Question, tightest: Answer | None) -> str:
    tried: list[str] = []
    near = _fastest(_light_pins(question), tried) or _fastest(_all_light_pins(question), tried)
    far = _fastest(_degree_pins(question), tried)
    if near is not None:
        faster = far is not None and far[1].priced.time.total_s < near[1].priced.time.total_s
        beside = f"; with other degrees, {_described(*far)}" if far and faster else ""
        return f"The cheapest change that fits: {_described(*near)}{beside}."
    far = far or _fastest(_all_pins(question), tried)
    if far is not None:
        return f"The cheapest change that fits: {_described(*far)}."
    free = replace(question, pins=Pins(), actions=None)
    changes = []
    for group in (_smaller_batch(free), _more_devices(free), _larger_devices(free, tightest)):
        for change in group:
            one = _search(change, tried)
            if one is not None:
                changes.append(_described(*one))
                break
    if changes:
        return f"The cheapest change that fits: {', or '.join(changes)}."
    return f"None of the changes that were tried fits: {', '.join(tried) or 'there was none'}."


def _fastest(changes: Iterable[_Change], tried: list[str]) -> tuple[str, Answer] | None:
    """Of those that fit."""
    answers = [pair for pair in (_search(change, tried) for change in changes) if pair]
    return min(answers, key=lambda pair: pair[1].priced.time.total_s, default=None)


def _search(change: _Change, tried: list[str]) -> tuple[str, Answer] | None:
    tried.append(change.words)
    try:
        best = search_plan(change.question).best
    except (DoesNotFit, LayoutError, Impossible):
        return None
    if change.words == SMALLER:
        batch, parts = change.question.batch, best.decided.candidate.microbatches
        return (
            f"a batch of {batch // parts} samples in place of {batch}, priced as {parts} of them",
            best,
        )
    return change.words, best


def _described(words: str, answer: Answer) -> str:
    memory = answer.priced.memory
    return (
        f"{words} ({layout_text(answer.decided)}): {size_text(memory.total)} of "
        f"{size_text(memory.limit)}, {answer.priced.time.total_s:.3g} s a step"
    )


def _light_pins(question: Question) -> Iterator[_Change]:
    """Each pin alone that is of no degree, where there are others."""
    if len(question.pins.texts()) > 1:
        yield from (_without(question, name) for name in _light(question))


def _all_light_pins(question: Question) -> Iterator[_Change]:
    """All of them at once, where degrees are pinned beside them."""
    light = _light(question)
    if 1 < len(light) < len(question.pins.texts()):
        yield _without(question, *light)


def _degree_pins(question: Question) -> Iterator[_Change]:
    """Each pinned degree alone, where there are other pins."""
    pinned, light = question.pins.texts(), _light(question)
    if len(pinned) > 1:
        yield from (_without(question, name) for name in pinned if name not in light)


def _light(question: Question) -> list[str]:
    """The pins that the degrees do not hang on; a file of actions has its own ranks."""
    heavy = (*DEGREES, PIPELINE, *(("schedule",) if question.actions is not None else ()))
    return [name for name in question.pins.texts() if name not in heavy]


def _without(question: Question, *names: str) -> _Change:
    pins, actions = question.pins.without(*names), question.actions
    if actions is not None and {PIPELINE, "schedule"} & {*names}:
        pins, actions = pins.without(PIPELINE, "schedule"), None
    texts = question.pins.texts()
    words = pairs_text({name: texts[name] for name in names})
    return _Change(f"without --fix {words}", replace(question, pins=pins, actions=actions))


def _all_pins(question: Question) -> Iterator[_Change]:
    if question.pins != Pins():
        yield _Change(
            f"without --fix {question.pins}", replace(question, pins=Pins(), actions=None)
        )


def _smaller_batch(question: Question) -> Iterator[_Change]:
    """A batch as large as a microbatch would have to be, where there may be no microbatches."""
    if question.obstacles and question.splits_batch:
        yield _Change(SMALLER, replace(question, obstacles=()))


def _more_devices(question: Question) -> Iterator[_Change]:
    """More devices on the outermost level; counts that the model state alone overflows are out."""
    cluster = question.cluster
    for factor in FACTORS:
        devices = factor * cluster.device_count
        if _least_state(question, devices) > cluster.memory_bytes:
            continue
        words = (
            f"{devices} devices in place of {cluster.device_count}, joined "
            f"by {cluster.levels[-1].name} too"
        )
        yield _Change(words, replace(question, cluster=resized(cluster, devices)))


def _larger_devices(question: Question, tightest: Answer | None) -> Iterator[_Change]:
    """A catalogue device no slower that the tightest layout fits: its own family's, then least."""
    if tightest is not None and tightest.priced.memory.total <= tightest.priced.memory.limit:
        return  # what is short is the host's memory
    now = question.cluster.device
    slowest_s = peak_time_s(question.graph, now)
    need = tightest.priced.memory.total if tightest is not None else now.memory_bytes + 1
    known = [
        device
        for device in catalogue().values()
        if device.kind == now.kind
        and device.memory_bytes >= need
        and peak_time_s(question.graph, device) <= slowest_s
    ]
    for device in sorted(known, key=lambda d: (d.family != now.family, d.memory_bytes))[:1]:
        groups = tuple(replace(g, device=device) for g in question.cluster.groups)
        words = f"{question.cluster.device_count} x {device.name} in place of {now.name}"
        yield _Change(words, replace(question, cluster=replace(question.cluster, groups=groups)))


def _least_state(question: Question, devices: int) -> int:
    """Bytes of parameters, gradients and optimizer state on each device, split over all of them."""
    mesh = Mesh((SHARD,), (devices,))
    state = StateSharding(3, mesh, 1, question.precision, question.optimizer)
    total = 0
    for _, tensor in question.graph.parameters():
        numel, kind = tensor.numel, Kind(tensor.dtype)
        total += state.parameter_bytes(numel, kind)
        if tensor.differentiable:
            total += state.gradient_bytes(numel, kind)
            if not question.offloads:
                total += state.optimizer_bytes(numel, kind)
    return total
