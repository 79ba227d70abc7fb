"""The peak of memory of a step of a JAX pipeline, of the device that holds most.

XLA says what each call takes beside its arguments and results. What lies between calls, the state,
the batch, gradients so far and what microbatches in flight keep, is added up along the actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from autopar.runtime.jax.calls import Call, Calls
from autopar.runtime.jax.parallel import State, held_of
from autopar.runtime.jax.staged import Pipeline

_CALLED = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def peak_bytes(
    step: Pipeline, own: Mapping[int, State], batch: Any, updates: int | None = None
) -> int:
    """``own``: the state of every stage; ``batch``: what each takes; as arrays or shapes that lie
    somewhere. What was called before is compiled already. ``updates``: bytes that an update takes
    beside state and gradients where the plan's optimizer does not step."""
    return max(peaks(step, own, batch, updates))


def peaks(
    step: Pipeline, own: Mapping[int, State], batch: Any, updates: int | None = None
) -> list[int]:
    """Of a device of each place on ``pp``; see `peak_bytes`."""
    calls = Calls(step, own, batch)
    played = Counter((action.stage, action.kind) for action in step.actions)
    by_name = {s.number: {c.name: c for c in calls.of(s, played)} for s in step.here}
    places = sorted({stage.stage.rank for stage in step.here})
    made = []
    for place in places:
        here = [stage for stage in step.here if stage.stage.rank == place]
        base = sum(on_one((own[s.number], batch[s.number])) for s in here)
        gradients, change = 0, dict[tuple[int, str], int]()
        for stage in here:
            n, known = stage.number, by_name[stage.number]
            back = known.get("backward") or known["backward_input"]
            kept = _shapes_bytes(back.given[3:5], stage.mesh.size)
            nothing = jax.eval_shape(stage.nothing, held_of(own[n]))
            gradients += _shapes_bytes(nothing, stage.mesh.size)
            change |= {(n, "F"): kept, (n, "B"): -kept, (n, "I"): -kept, (n, "W"): 0}
            if "backward_weight" in known:
                pending = _shapes_bytes(known["backward_weight"].given[3:6], stage.mesh.size)
                change |= {(n, "I"): pending - kept, (n, "W"): -pending}
        held, most = 0, 0
        for n, kind, _ in step.actions:
            if n not in by_name:
                continue
            name = _CALLED[kind] if _CALLED[kind] in by_name[n] else "backward"
            if (n, kind) not in change or (kind == "W" and name == "backward"):
                continue
            most = max(most, held + _beside(by_name[n][name]))
            held += change[n, kind]
        last = ("summed",) if updates is not None else ("summed", "updated")
        ends = max(_beside(by_name[s.number][name]) for s in here for name in last)
        made.append(base + gradients + max(most, ends, updates or 0))
    return made


def _beside(call: Call) -> int:
    return beside(call.memory())


def beside(memory: Any) -> int:
    """Bytes that a call takes beside what it is given, by XLA's account of it."""
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + max(0, made))


def on_one(tree: Any) -> int:
    """Bytes of the piece that one device has of each array."""
    arrays = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def _shapes_bytes(tree: Any, devices: int) -> int:
    """Bytes on one device of pieces of ``devices``."""
    return sum(math.prod(x.shape) * x.dtype.itemsize // devices for x in jax.tree.leaves(tree))
