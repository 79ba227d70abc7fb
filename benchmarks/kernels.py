"""Kernels of our own beside plain torch: interpreted and compiled here, timed on a device.

    python -m benchmarks.kernels [--kernels K,...] [--shapes N] [--targets T,...] [--json [FILE]]
    python -m benchmarks.kernels --device cuda --out FILE [--seconds S]

The first needs no device. Every kernel is interpreted at N tiny shapes with remainders: results
and gradients within its tolerance of torch in float32, 8-bit floats bit for bit, a second backward
equal to the first, no input written. And every kernel is compiled for sm_80, sm_90 and sm_100 at
shapes of published models: no register spilled, shared memory within the device's limit.
The second (``kernel_timing.py``) imports torch, triton and the kernels alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.runtime.pytorch.kernels.table import KERNELS, kernel

SHAPES = 20
COMPILING = 180.0
"""CPU seconds for all kernels and targets together."""
SECONDS = 130.0
"""After which no other call is begun: with the last one, 150 at most."""
Row = dict[str, Any]


def interpreted(kernels: Sequence[str], count: int) -> list[Row]:
    """A row a kernel; in a process with TRITON_INTERPRET=1."""
    from benchmarks.kernel_cases import cases, check

    rows = []
    for name in kernels:
        start = time.process_time()
        checked = [check(case) for case in cases(name, count)]
        rows.append(
            {
                "kernel": name,
                "cases": count,
                "error": max(one.error for one in checked),
                "repeated": sum(one.repeated for one in checked),
                "untouched": sum(one.untouched for one in checked),
                "cpu_s": round(time.process_time() - start, 1),
            }
        )
    return rows


def compiled(kernels: Sequence[str], targets: Sequence[int]) -> list[Row]:
    """A row a function and a target; the last says the CPU seconds of all."""
    from benchmarks.kernel_compile import compiled as every
    from benchmarks.kernel_compile import cpu_seconds

    start = cpu_seconds()
    rows = list(every(kernels, targets))
    return [*rows, {"cpu_s": cpu_seconds() - start}]


def both(kernels: Sequence[str], count: int, targets: str) -> tuple[list[Row], list[Row]]:
    """Interpreted and compiled, each in a process of its own: triton asks once, at its import,
    whether it interprets."""
    with tempfile.TemporaryDirectory() as cache:
        here = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        words = [sys.executable, "-m", "benchmarks.kernels", "--kernels", ",".join(kernels)]
        processes = [
            subprocess.Popen([*words, *more], stdout=subprocess.PIPE, text=True, env=environment)
            for more, environment in (
                (
                    ["--part", "interpreted", "--shapes", str(count)],
                    here | {"TRITON_INTERPRET": "1"},
                ),
                (["--part", "compiled", "--targets", targets], here),
            )
        ]
        printed = [process.communicate()[0] for process in processes]
    for process, name in zip(processes, ("interpreted", "compiled"), strict=True):
        if process.returncode:
            sys.exit(f"the {name} part ended with exit code {process.returncode}")
    first, second = (json.loads(text.splitlines()[-1]) for text in printed)
    return first, second


def judged(interpreted_rows: Sequence[Row], compiled_rows: Sequence[Row]) -> tuple[list[Row], Any]:
    """(rows of one table, targets)."""
    from benchmarks.figures import Target

    *functions, last = compiled_rows
    far = [row for row in interpreted_rows if row["error"] > kernel(row["kernel"]).tolerance]
    cases = sum(row["cases"] for row in interpreted_rows)
    targets = [
        Target("kernels beyond their tolerance", len(far), 0),
        Target("largest error", max(row["error"] for row in interpreted_rows), 1e-6),
        Target("second backwards that differ", cases - _sum(interpreted_rows, "repeated"), 0),
        Target("cases with an input written", cases - _sum(interpreted_rows, "untouched"), 0),
        Target("bytes of registers spilled", _sum(functions, "spilled"), 0),
        Target("beyond shared memory", sum(r["shared"] > r["limit"] for r in functions), 0),
        Target("CPU s to compile", last["cpu_s"], COMPILING),
    ]
    columns = ("kernel", "function", "on", "cases", "error", "registers", "spilled", "shared_kib")
    rows = [
        *({**row, "on": "interpreter"} for row in interpreted_rows),
        *(
            {
                **row,
                "function": row["function"].split(".")[1],
                "on": row["target"],
                "cases": row["variants"],
                "shared_kib": round(row["shared"] / 1024, 1),
            }
            for row in functions
        ),
    ]
    return [{column: row.get(column) for column in columns} for row in rows], targets


def _sum(rows: Sequence[Row], column: str) -> int:
    return sum(row[column] for row in rows)


def on_device(device: str, out: Path, seconds: float) -> bool:
    """Times everything; whether every target is met."""
    import torch

    from benchmarks.kernel_timing import cuda_milliseconds, timed

    torch.manual_seed(0)
    table = timed(torch.device(device), seconds, cuda_milliseconds)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps({key: table[key] for key in ("means", "targets", "seconds", "machine")}))
    return all(target["met"] for target in table["targets"])


def main() -> None:
    names = [row.name for row in KERNELS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", default=",".join(names))
    parser.add_argument("--shapes", type=int, default=SHAPES)
    parser.add_argument("--targets", default="80,90,100", help="compute capabilities")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("out/kernels.json"))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--part", choices=("interpreted", "compiled"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    kernels = asked.kernels.split(",")
    if unknown := set(kernels) - set(names):
        parser.error(f"no kernel {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if asked.device:
        sys.exit(0 if on_device(asked.device, asked.out, asked.seconds) else 1)
    if asked.part == "interpreted":
        print(json.dumps(interpreted(kernels, asked.shapes)))
        return
    if asked.part == "compiled":
        print(json.dumps(compiled(kernels, [int(t) for t in asked.targets.split(",")])))
        return
    from benchmarks.figures import show

    rows, targets = judged(*both(kernels, asked.shapes, asked.targets))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown) if asked.json else contextlib.nullcontext():
        show(rows, targets, bool(asked.json))
    if asked.json == "-":
        print(shown.getvalue().strip())
    elif asked.json:
        Path(asked.json).write_text(shown.getvalue())
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
