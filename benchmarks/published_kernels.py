"""Single kernels: predicted against measured figures that others published.

    python -m benchmarks.published_kernels CSV... [--json] [--fit]

A file whose rows have an `id` is judged by class against targets: loss heads in chunks, kernels
bound by memory, attention, products, collectives, overlap, whole steps. The formulas are those of
`cost_models/kernels`, their constants those that no row of the judged device went into; `--json`
has the prediction for every row. Rows that no formula is for are counted by reason. `--fit` fits
the constants to the rows of all files and writes `kernels.yaml`.

A file without ids (single products and attention, by their rates) is judged with the others where
it is beside one. Alone, its 16-bit products and fused attention are priced as ops of a captured
model are, with the constants that training runs were fitted with, not these rows. A run at
sustained clocks reaches less than a product alone, so a bias of some tenths is expected; the spread
around it says how well shapes are understood.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.compute import OpClass, op_rate
from autopar.rules.work_shape import thinness
from benchmarks.figures import Target, show
from benchmarks.kernel_fit import write
from benchmarks.kernel_judgement import classes, prices, unpriced
from benchmarks.kernel_microbench import read_microbench
from benchmarks.kernel_prices import Priced
from benchmarks.kernel_rows import KernelRow, read_kernel_rows

DEVICES = {
    "A100 PCIe": "A100-80GB-PCIe",
    "B200": "B200",
    "H100-class (sm_90)": "H100",
    "MI300X-class (gfx942)": "MI300X",
    "MI355X-class (gfx950)": "MI355X",
}
"""Catalogue names of the devices that the file has products of many shapes of."""
SMALL_FLOPS = 2.0 * 2048**3


@dataclass(frozen=True)
class Kernel:
    """One measured kernel; ``flops`` as its source counts them."""

    device: str
    op_class: OpClass
    direction: str
    flops: float
    moved_bytes: float
    thinness: float
    head_dim: int
    rows: int
    measured_s: float


def read(path: Path) -> Iterator[Kernel]:
    """The rows that can be priced."""
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["device"] in DEVICES and row["unit"] == "TFLOP/s":
                yield from _kernel(row)


def _kernel(row: Mapping[str, str]) -> Iterator[Kernel]:
    size = {name.lower(): int(n) for name, n in re.findall(r"([A-Za-z_]+)=?(\d+)", row["size"])}
    rate = float(row["value"]) * 1e12
    if row["kind"] == "gemm" and {"m", "n", "k"} <= size.keys():
        m, n, k, batch = size["m"], size["n"], size["k"], size.get("b", 1)
        flops = 2.0 * batch * m * n * k
        moved = 2.0 * batch * (m * n + n * k + m * k)
        yield Kernel(
            *(row["device"], "matmul", "forward", flops, moved, thinness((m, n, k)), 0, 0),
            measured_s=flops / rate,
        )
    if row["kind"].startswith("attention") and size.get("seq_len"):
        tokens = size["batch"] * size["seq_len"]
        heads, shared = size["head_num"], size["kv_head_num"]
        wide, out = size["qk_head_dim"], size["v_head_dim"]
        backward = row["kind"] == "attention_bwd"
        whole = 2.0 * tokens * size["seq_len"] * heads * (wide + out) * (2.5 if backward else 1.0)
        moved = 2.0 * tokens * (heads + shared) * (wide + out) * (2 if backward else 1)
        yield Kernel(
            row["device"],
            "attention",
            "backward" if backward else "forward",
            whole / 2,  # causal: the kernel leaves out what the mask does, the source counts it
            moved,
            thinness((size["seq_len"],)),
            wide,
            tokens * heads,
            whole / rate,
        )


def predicted_s(kernel: Kernel) -> float:
    device = find_device(DEVICES[kernel.device])
    rate = op_rate(device, "bf16", kernel.op_class, head_dim=kernel.head_dim)
    return rate.time_s(kernel.flops, kernel.moved_bytes, thinness=kernel.thinness, rows=kernel.rows)


def summary(kernels: Iterable[Kernel]) -> list[dict[str, object]]:
    """Errors by device, class and size: predicted over measured, less one."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        small = kernel.op_class == "matmul" and kernel.flops < SMALL_FLOPS
        kind = f"{'small ' if small else ''}{kernel.op_class}"
        error = predicted_s(kernel) / kernel.measured_s - 1
        groups[DEVICES[kernel.device], kind, kernel.direction].append(error)
    rows: list[dict[str, object]] = []
    for (device, kind, direction), values in sorted(groups.items()):
        errors = np.array(values)
        spread = np.abs((1 + errors) / (1 + np.median(errors)) - 1)
        rows.append(
            {
                "device": device,
                "kernel": kind,
                "direction": direction,
                "n": len(errors),
                "bias": float(np.median(errors)),
                "median": float(np.median(np.abs(errors))),
                "p90": float(np.quantile(np.abs(errors), 0.9)),
                "spread_p90": float(np.quantile(spread, 0.9)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fit", action="store_true", help="write cost_models/kernels/kernels.yaml")
    options = parser.parse_args()
    with_ids = [path for path in options.csv if has_ids(path)]
    tables = [path for path in options.csv if path not in with_ids]
    if with_ids or options.fit:
        rows = [row for path in with_ids for row in read_kernel_rows(path)]
        rows += [row for path in tables for row in read_microbench(path)]
        if options.fit:
            write(rows)
        judge(rows, options.json)
        return
    kernels = [kernel for path in tables for kernel in read(path)]
    if not kernels:
        raise SystemExit(f"{tables[0]}: no product or attention on {', '.join(DEVICES)}")
    show(summary(kernels), [], options.json)


def has_ids(path: Path) -> bool:
    """The rows of a file have ids of their own."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return "id" in next(csv.reader(file), [])


def judge(rows: Sequence[KernelRow], as_json: bool) -> None:
    """Prints errors by class, or the prediction for each row."""
    predicted = prices(rows)
    judged = classes(rows, predicted)
    lines = [one.data() for one in judged]
    reasons = dict(unpriced(predicted).most_common())
    if as_json:
        data = [row_data(row, predicted[row.id]) for row in rows]
        print(json.dumps({"rows": data, "classes": lines, "unpriced": reasons}, indent=1))
        return
    limits = [limit for one in judged for limit in one.limits()]
    show(lines, [Target(*limit) for limit in limits], False)
    print(f"\nnot priced: {sum(reasons.values())} of {len(rows)} rows")
    for reason, count in reasons.items():
        print(f"  {count:4d}  {reason}")


def row_data(row: KernelRow, predicted: Priced) -> dict[str, object]:
    """The prediction for a row; None: it is not priced, for the reason beside."""
    time_s, memory_bytes = predicted.time_s, predicted.memory_bytes
    return {
        "id": row.id,
        "predicted_time_ms": None if time_s is None else 1e3 * time_s,
        "predicted_memory_mb": None if memory_bytes is None else memory_bytes / 2**20,
        "reason": predicted.reason or None,
    }


if __name__ == "__main__":
    main()
