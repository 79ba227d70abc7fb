"""A timeline as events of Chrome's trace format, which Perfetto opens.

Every rank is a process with a track for each stream; transfers are flows from the sender's track to
the action that they arrive for; what a rank holds for backward is a counter. Times are in
microseconds, as the format asks ("Trace Event Format", Google, complete, flow and counter events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.play import Span, Stream, Timeline, memory

MICRO = 1e6
Event = dict[str, Any]
STREAMS: tuple[Stream, ...] = ("compute", "send", "data")
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def timeline_events(
    timeline: Timeline,
    schedule: Schedule,
    kept_bytes: Callable[[int], float],
    state_bytes: Callable[[int], float],
) -> list[Event]:
    """Every rank is a process of its number.

    kept_bytes:  what a stage keeps of one microbatch for backward.
    state_bytes: what a rank holds all the time.
    """
    events: list[Event] = []
    for rank in range(len(timeline.busy_s)):
        events += process_tracks(rank, f"pipeline rank {rank}", STREAMS)
    compute = timeline.compute()
    for number, span in enumerate(timeline.spans):
        events.append(_span(span))
        if span.stream == "send" and span.target is not None:
            events += _flow(number, span, schedule, compute)
    curves = memory(timeline, kept_bytes, lambda stage: 0.0)
    for rank, curve in enumerate(curves):
        for time_s, held in curve:
            events.append(
                {
                    "ph": "C",
                    "name": "bytes held",
                    "pid": rank,
                    "ts": time_s * MICRO,
                    "args": {"state": state_bytes(rank), "for backward": held},
                }
            )
    return events


def process_tracks(process: int, name: str, tracks: Sequence[str]) -> Iterator[Event]:
    """The names of a process and of its tracks, which are numbered in their order."""
    named = {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield named
    for track, its in enumerate(tracks):
        yield {**named, "name": "thread_name", "tid": track, "args": {"name": its}}


def complete(
    process: int, track: int, name: str, category: str, at_s: tuple[float, float], **args: Any
) -> Event:
    """Something that starts and ends."""
    start_s, end_s = at_s
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": track,
        "ts": start_s * MICRO,
        "dur": (end_s - start_s) * MICRO,
        "args": args,
    }


def _span(span: Span) -> Event:
    action = span.action
    what = str(action)
    if span.stream == "send":
        what = f"{action} to stage {span.target}"
    elif span.stream == "data":
        what = f"gradients of stage {action.stage}"
    category = NAMES[action.kind] if span.stream == "compute" else span.stream
    track, at_s = STREAMS.index(span.stream), (span.start_s, span.end_s)
    of = {"stage": action.stage, "microbatch": action.microbatch}
    return complete(span.rank, track, what, category, at_s, **of)


def _flow(
    number: int, span: Span, schedule: Schedule, compute: Mapping[Action, Span]
) -> Iterator[Event]:
    """From a send to the first action that it can be for."""
    assert span.target is not None
    kinds = "F" if span.action.kind == "F" else "BI"
    for kind in kinds:
        wanted = Action(span.target, kind, span.action.microbatch)  # type: ignore[arg-type]
        if wanted not in compute:
            continue
        common = {"name": "transfer", "cat": "transfer", "id": number}
        yield {
            **common,
            "ph": "s",
            "pid": span.rank,
            "tid": STREAMS.index("send"),
            "ts": span.start_s * MICRO,
        }
        yield {
            **common,
            "ph": "f",
            "bp": "e",
            "pid": schedule.ranks[span.target],
            "tid": STREAMS.index("compute"),
            "ts": compute[wanted].start_s * MICRO,
        }
        return
