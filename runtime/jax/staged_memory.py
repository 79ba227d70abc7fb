"""The peak of memory of a step of a JAX pipeline, of the device that holds most.

XLA says what each call takes beside its arguments and results. What lies between calls, the state,
the batch, gradients so far and what microbatches in flight keep, is added up along the log.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from autopar.runtime.jax.calls import Call, Calls
from autopar.runtime.jax.parallel import State
from autopar.runtime.jax.staged import Pipeline


def peak_bytes(step: Pipeline, state: State, batch: Any) -> int:
    """Behind a step, which has compiled all calls."""
    return max(peaks(step, state, batch))


def peaks(step: Pipeline, state: State, batch: Any) -> list[int]:
    """Of a device of each place on ``pp``."""
    own = step.apart(state)
    calls = Calls(step, own, batch)
    played = Counter((one.action.stage, one.action.kind) for one in step.log)
    by_name = {s.number: {c.name: c for c in calls.of(s, played)} for s in step.stages}
    places = sorted({stage.stage.rank for stage in step.stages})
    made = []
    for place in places:
        here = [stage for stage in step.stages if stage.stage.rank == place]
        base = sum(on_one(jax.tree.leaves((own[s.number], batch[s.number]))) for s in here)
        gradients = {
            s.number: _shapes_bytes(by_name[s.number]["backward"].given[6], s.mesh.size)
            for s in here
        }
        kept = {
            s.number: _shapes_bytes(by_name[s.number]["backward"].given[3:5], s.mesh.size)
            for s in here
        }
        held, most = 0, 0
        for one in step.log:
            n, kind = one.action.stage, one.action.kind
            if n not in gradients or kind == "W":
                continue
            name = "forward" if kind == "F" else "backward"
            most = max(most, held + _beside(by_name[n][name]))
            held += kept[n] if kind == "F" else -kept[n]
        ends = max(_beside(by_name[s.number][name]) for s in here for name in ("summed", "updated"))
        made.append(base + sum(gradients.values()) + max(most, ends))
    return made


def _beside(call: Call) -> int:
    """Bytes that a call takes beside what it is given."""
    memory = call.memory()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + max(0, made))


def on_one(arrays: Iterable[Any]) -> int:
    """Bytes of the piece that the first device has of each array."""
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def _shapes_bytes(tree: Any, devices: int) -> int:
    """Bytes on one device of arrays whose first dim counts devices."""
    return sum(math.prod(x.shape) * x.dtype.itemsize // devices for x in jax.tree.leaves(tree))
