"""The process of `autopar profile --framework jax`: every measurement is one line of JSON.

    python -m autopar.runtime.profile.jax.worker 'file of what is known already' devices kind

It sees all devices. An op takes what the slowest of them takes, an empty call left out; a
collective what it adds to that. A figure is the median over repeats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from autopar.runtime.jobs.host_memory import resident_bytes
from autopar.runtime.profile.cases import (
    CHAIN_BYTES,
    UPDATE_MOVES,
    UPDATED,
    WAYS,
    Case,
    cases,
    least_cases,
)
from autopar.runtime.profile.figures import SIZES, Known, write
from autopar.runtime.profile.jax.bench import Bench
from autopar.runtime.profile.jax.collectives import exchanges
from autopar.runtime.profile.jax.ops import CALLS, Chain, Update

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
"""With the catalogue's names."""
IN_HALF = ("linear", "attention", "add", "layer_norm")
"""One kind of each class."""
WIDE = 8
"""Times the rows, on devices that are wide."""


def measure_process(bench: Bench) -> None:
    """Memory that the process holds before a model, by device, and an empty call's time."""
    if not any(subject == "process" for subject, *_ in bench.known):
        write("process", "start", resident_bytes() / bench.devices, 0.0, [bench.start_s] * 2)


def measure_case(bench: Bench, case: Case, dtype: str, chain_bytes: float = CHAIN_BYTES) -> None:
    """Forward and backward of one case."""
    if case.called not in CALLS:
        return
    work = case.work(dtype)
    keys = [f"{work.cost} {work.kind} {way} {DTYPES[dtype]} {case.name}" for way in WAYS]
    forward = ("op", keys[0], work.forward_bytes, work.forward_flops)
    backward = ("op", keys[1], work.backward_bytes, work.backward_flops)
    if not bench.wants(*forward) and not bench.wants(*backward):
        return
    chain = Chain(case, dtype, bench, chain_bytes)
    taken = bench.times((chain.forward, chain.operands), (chain.backward, chain.made))
    for figure, times in zip((forward, backward), taken, strict=True):
        write(*figure, [(t - bench.start_s) / chain.calls for t in times])


def measure_updates(bench: Bench, sizes: Sequence[int] = (1 << 18, 1 << 21, 1 << 23)) -> None:
    """The optimizer's step by the bytes that it reads and writes; ``sizes`` in elements."""
    for elements in sizes:
        moved = 4.0 * UPDATE_MOVES * elements
        key = f"update {UPDATED} forward fp32 {elements}"
        if bench.wants("op", key, moved, 0.0):
            update = Update(elements, bench)
            (taken,) = bench.times((update.step, update.operands))
            write("op", key, moved, 0.0, [t - bench.start_s for t in taken])


def measure_collectives(bench: Bench, sizes: Sequence[int] = SIZES) -> None:
    """What each adds; ``sizes`` in bytes."""
    for exchange in exchanges(bench.devices, sizes):
        if not bench.wants("collective", exchange.key, exchange.size_bytes, 0.0):
            continue
        without, together = bench.times(
            (exchange.none, exchange.operands), (exchange.call, exchange.operands)
        )
        added = [(b - a) / exchange.rounds for a, b in zip(without, together, strict=True)]
        write("collective", exchange.key, exchange.size_bytes, 0.0, added)


def begun() -> tuple[Known, int]:
    """The rows that are known already, and of how many devices. Ends the process where jax has
    fewer of that kind, with the reason."""
    known, devices, kind = sys.argv[1:4]
    here = jax.devices()
    kinds = {device.device_kind for device in here}
    if len(here) < int(devices) or (kind and kinds != {kind}):
        sys.exit(
            f"the cluster has {devices} devices{f' of {kind!r}' if kind else ''}, jax finds "
            f"{len(here)} of {', '.join(map(repr, sorted(kinds)))}; profile where the devices are"
        )
    jnp.zeros(()).block_until_ready()
    return {tuple(row) for row in json.loads(Path(known).read_text())}, int(devices)


def main() -> None:
    bench = Bench(*begun())
    measure_process(bench)
    wide = jax.devices()[0].platform != "cpu"
    for dtype in DTYPES:
        for case in (*least_cases(), *cases(WIDE if wide else 1)):
            if dtype == "float32" or case.kind in IN_HALF:
                measure_case(bench, case, dtype)
    measure_updates(bench)
    measure_collectives(bench)


if __name__ == "__main__":
    main()
