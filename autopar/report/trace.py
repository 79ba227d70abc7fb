"""A step for Perfetto: its timeline, and of each stage the last microbatch op by op, as priced.

There every unit is a span on the track ``units``; its ops are on ``compute``, its collectives over
model axes on ``model axes``, what gathers its parameters and reduces its gradients on
``data axes``. What hidden collectives over data axes take of the compute comes behind a pass as one
span.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.lowering.lowered import Lowered
from autopar.pipeline.trace import Event, complete, process_tracks, timeline_events
from autopar.pricing.op_spans import OpSpan, Way, op_spans
from autopar.pricing.planned import PricedPipeline
from autopar.pricing.prices import Prices
from autopar.pricing.stage_time import StageTime, note_microbatch
from autopar.pricing.streams import Work

TRACKS = ("units", "compute", "model axes", "data axes")
CONTENTION = "contention: hidden collectives share memory with compute"
PASSES: Mapping[Work, Way] = {"forward": "forward", "backward": "backward"}


@dataclass(frozen=True, slots=True)
class _Played:
    work: Work
    place: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StageUnits:
    """The root of a stage, then every call of a block in it: its name and what it is lowered to."""

    names: tuple[str, ...]
    bodies: tuple[Lowered, ...]

    @staticmethod
    def of(part: Lowered) -> StageUnits:
        seen: Counter[str] = Counter()
        names, bodies = ["outside the blocks"], [part]
        for op in part.ops:
            if op.bound is None:
                block = op.op.attrs["block"]
                names.append(f"{block} {seen[block]}")
                bodies.append(part.blocks[block])
                seen[block] += 1
        return StageUnits(tuple(names), tuple(bodies))


def trace_of(priced: PricedPipeline) -> str:
    """As JSON text."""
    saved = [priced.prices.saved_bytes(stage, *run) for stage, run in enumerate(priced.runs)]
    memories = priced.prices.memory(priced.runs, priced.schedule)
    state = [m.parameters + m.gradients + m.optimizer for m in memories]
    events = timeline_events(
        priced.timeline, priced.schedule, lambda stage: saved[stage], lambda rank: state[rank]
    )
    events += microbatch_events(priced)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def microbatch_events(priced: PricedPipeline) -> Iterator[Event]:
    """Of each stage, behind the processes of the timeline; equal stages once."""
    shown = set()
    for stage, run in enumerate(priced.runs):
        own = priced.prices.at(stage)
        alike = (own.model.cuts.signature(*run), own.state, str(own.recompute), own.cluster)
        if alike in shown:
            continue
        shown.add(alike)
        process = len(priced.timeline.busy_s) + stage
        title = "one microbatch" if len(priced.runs) == 1 else f"one microbatch of stage {stage}"
        yield from process_tracks(process, f"{title}, op by op", TRACKS)
        yield from _stage_events(priced, stage, process)


def _stage_events(priced: PricedPipeline, stage: int, process: int) -> Iterator[Event]:
    prices, (first, end) = priced.prices.at(stage), priced.runs[stage]
    model = prices.model
    whole = (first, end) == (0, len(model.units))
    units = StageUnits.of(model.lowered if whole else model.cuts.part(first, end).lowered)
    played: list[_Played] = []

    def note(work: Work, place: int, start_s: float, end_s: float) -> None:
        played.append(_Played(work, place, float(start_s), float(end_s)))

    given = (model.stage_summary(first, end), prices.state, prices.cluster, prices.recompute)
    note_microbatch(*given, prices.alone, note)
    time = prices.time(first, end)
    ahead = [one for one in played if one.work in ("forward", "gather")]
    back = [one for one in played if one.work not in ("forward", "gather")]
    there_s = max(one.end_s for one in ahead)
    laid_out: dict[tuple[int, Way], list[OpSpan]] = {}
    for one in ahead:
        yield from _events(one, 0.0, units, model.prices, process, laid_out)
    yield from _contention(process, there_s, float(time.forward_s))
    late_s = max(0.0, float(time.forward_s) - there_s)
    for one in back:
        yield from _events(one, late_s, units, model.prices, process, laid_out)
    done_s = late_s + max(one.end_s for one in back)
    yield from _contention(process, done_s, _end_s(time, prices.alone))


def _end_s(time: StageTime, alone: bool) -> float:
    """When the microbatch is done, with what is reduced beside it where that is so."""
    return float(time.forward_s + time.backward_s + (time.reduce_s if alone else 0.0))


def _contention(process: int, start_s: float, end_s: float) -> Iterator[Event]:
    if end_s - start_s > 1e-9 * end_s:
        yield complete(process, 1, CONTENTION, "contention", (start_s, end_s))


def _events(
    one: _Played,
    later_s: float,
    units: StageUnits,
    prices: Prices,
    process: int,
    laid_out: dict[tuple[int, Way], list[OpSpan]],
) -> Iterator[Event]:
    """Of a unit's pass or of a collective of its state; ``laid_out``: by body, kept."""
    name, at = units.names[one.place], (one.start_s + later_s, one.end_s + later_s)
    way = PASSES.get(one.work)
    if way is None:
        what = "gradients of" if one.work == "reduce" else "parameters of"
        yield complete(process, TRACKS.index("data axes"), f"{what} {name}", one.work, at)
        return
    yield complete(process, TRACKS.index("units"), f"{name}, {way}", way, at)
    body = units.bodies[one.place]
    spans = laid_out.get((id(body), way))
    if spans is None:
        spans = laid_out[id(body), way] = op_spans(body, prices, way)[0]
    taken_s = max((span.end_s for span in spans), default=0.0)
    again_s = max(0.0, at[1] - at[0] - taken_s)
    if again_s > 1e-9 * (at[1] - at[0]):
        yield complete(process, 1, "forward again", "recompute", (at[0], at[0] + again_s))
    for span in spans:
        start_s, end_s = (at[0] + again_s + s for s in (span.start_s, span.end_s))
        sizes = {"bytes": span.moved_bytes} if span.moved_bytes else {}
        track = TRACKS.index(span.stream)
        yield complete(process, track, span.what, span.stream, (start_s, end_s), **sizes)
