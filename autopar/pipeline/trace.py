"""A timeline in the trace format of Chrome, which Perfetto opens.

Every rank is a process with a track for each stream; transfers are flows from the sender's track to
the action that they arrive for; what a rank holds for backward is a counter. Times are in
microseconds, as the format asks ("Trace Event Format", Google, complete, flow and counter events).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.play import Span, Stream, Timeline, memory

MICRO = 1e6
STREAMS: tuple[Stream, ...] = ("compute", "send", "data")
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def chrome_trace(
    timeline: Timeline,
    schedule: Schedule,
    kept_bytes: Callable[[int], float],
    state_bytes: Callable[[int], float],
) -> str:
    """The trace as JSON text.

    kept_bytes:  what a stage keeps of one microbatch for backward.
    state_bytes: what a rank holds all the time.
    """
    events = [*_tracks(timeline)]
    compute = timeline.compute()
    for number, span in enumerate(timeline.spans):
        events.append(_complete(span))
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
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _tracks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(len(timeline.busy_s)):
        yield {
            "ph": "M",
            "name": "process_name",
            "pid": rank,
            "args": {"name": f"pipeline rank {rank}"},
        }
        for thread, stream in enumerate(STREAMS):
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": thread,
                "args": {"name": stream},
            }


def _complete(span: Span) -> dict[str, Any]:
    action = span.action
    what = str(action)
    if span.stream == "send":
        what = f"{action} to stage {span.target}"
    elif span.stream == "data":
        what = f"gradients of stage {action.stage}"
    return {
        "ph": "X",
        "name": what,
        "cat": NAMES[action.kind] if span.stream == "compute" else span.stream,
        "pid": span.rank,
        "tid": STREAMS.index(span.stream),
        "ts": span.start_s * MICRO,
        "dur": (span.end_s - span.start_s) * MICRO,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _flow(
    number: int, span: Span, schedule: Schedule, compute: Mapping[Action, Span]
) -> Iterator[dict[str, Any]]:
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
