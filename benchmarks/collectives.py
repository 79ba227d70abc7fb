"""Algorithms of collectives: synthesised, priced, played on gloo, and over a slow link.

    python -m benchmarks.collectives [--json [FILE]] [--slow-link [SCRIPT]] [--rounds 20]

Without ``--slow-link`` three tables: SCCL's instances, solved or refuted, with CPU seconds; the
price of an all-reduce by topology, size and algorithm; and the same played on gloo processes of
this machine, where sums must be exact to the bit (times there are those of processes that share its
cores, not of the topology). With it the two-level all-reduce beside the library's, on two hosts of
two processes joined by 400 Mbit/s: SCRIPT (``two_hosts.sh RATE NPROC_PER_HOST TORCHRUN ARG...``)
makes them, or else `benchmarks.two_hosts`, with a share of a core for each process; needs root and
iproute2. Rounds are interleaved, times medians; the library's own stands twice, to show how far
equals are apart. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.collectives.price import fastest, time_s
from autopar.collectives.synthesis import NAME, Instance, Status, synthesise
from benchmarks import two_hosts
from benchmarks.collective_topologies import INSTANCES, TOPOLOGIES, all_reduces
from benchmarks.figures import Target, show

SIZES = (4 << 10, 1 << 20, 64 << 20)
PLAYED_RANKS = (4, 8, 16)
CPU_S, RATIO = 5.0, 0.88
RATE, PER_HOST, SLOW_BYTES = "400mbit", 2, 8 << 20
RANKS = "benchmarks.collectives_ranks"
Row = dict[str, Any]


def solved(name: str, instance: Instance, wanted: Status) -> tuple[Row, list[Target]]:
    start = time.process_time()
    answer = synthesise(TOPOLOGIES[name], instance)
    cpu_s = time.process_time() - start
    what = f"{name} {instance}"
    row = {"what": what, "answer": answer.status, "wanted": wanted, "cpu_s": cpu_s}
    return row, [
        Target(f"{what}: CPU seconds", cpu_s, CPU_S),
        Target(f"{what}: not {wanted}", float(answer.status != wanted), 0.0),
    ]


def synthesis_table() -> tuple[list[Row], list[Target]]:
    synthesise(TOPOLOGIES["2x2"], Instance(1, 2, 3))  # the solver is imported
    pairs = [solved(*instance) for instance in INSTANCES]
    return [row for row, _ in pairs], [target for _, targets in pairs for target in targets]


def price_table() -> list[Row]:
    """Milliseconds by size; a row is an algorithm on a topology."""
    return [
        {
            "what": f"{name} {algorithm.name}",
            "steps": len(algorithm.steps),
            "chunks": algorithm.chunks,
            **{f"{_size(b)} ms": 1e3 * time_s(algorithm, topology, b) for b in SIZES},
        }
        for name, topology in TOPOLOGIES.items()
        for algorithm in all_reduces(name)
    ]


def against_known() -> list[Target]:
    """Large all-reduces where known ones use every link: the best made, times the best known."""
    targets = []
    for name in ("dgx1", "torus-4x4"):
        best = [
            fastest(
                [a for a in all_reduces(name) if a.name.startswith(NAME) == is_made],
                TOPOLOGIES[name],
                SIZES[-1],
            )[1]
            for is_made in (True, False)
        ]
        what = f"{name}: synthesised, times the fastest known, {_size(SIZES[-1])}"
        targets.append(Target(what, best[0] / best[1], 1.0))
    return targets


def played_table(scratch: Path) -> tuple[list[Row], list[Target]]:
    rows: list[Row] = []
    for ranks in PLAYED_RANKS:
        file, codes = scratch / f"{ranks}.json", scratch / f"{ranks}.codes"
        command = ["-m", "autopar.runtime.jobs.local_ranks", str(ranks), str(codes)]
        _run([sys.executable, *command, "-m", RANKS, "played", str(file)])
        for size_bytes, by_name in json.loads(file.read_text()).items():
            for name, result in by_name.items():
                median_ms = 1e3 * statistics.median(result["seconds"])
                what = f"{ranks} ranks {name}"
                size = _size(int(size_bytes))
                rows.append({"what": what, "size": size, "exact": result["exact"], "ms": median_ms})
    wrong = sum(not row["exact"] for row in rows)
    return rows, [Target("played all-reduces that are not exact", float(wrong), 0.0)]


def slow_table(script: Path | None, rounds: int, scratch: Path) -> tuple[list[Row], list[Target]]:
    file = scratch / "slow.json"
    words = ["-m", RANKS, "slow", str(file), str(rounds), str(SLOW_BYTES), str(PER_HOST)]
    if script is not None:
        torchrun = Path(sys.executable).with_name("torchrun")
        _run(["bash", str(script), RATE, str(PER_HOST), str(torchrun), *words])
    else:
        with two_hosts.hosts(RATE) as launcher:
            _run([*launcher, *words])
    results = json.loads(file.read_text())
    medians = {name: statistics.median(result["seconds"]) for name, result in results.items()}
    rows = [
        {
            "what": name,
            "exact": result["exact"],
            "ms": 1e3 * medians[name],
            "least ms": 1e3 * min(result["seconds"]),
            "most ms": 1e3 * max(result["seconds"]),
            "times the library's": medians[name] / medians["library"],
        }
        for name, result in results.items()
    ]
    wrong = sum(not result["exact"] for result in results.values())
    library_s = min(medians["library"], medians["library again"])
    return rows, [
        Target(
            "two-level, times the faster of the library's two",
            medians["two-level"] / library_s,
            RATIO,
        ),
        Target("all-reduces that are not exact", float(wrong), 0.0),
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")


def tables(
    given: argparse.Namespace, scratch: Path
) -> Mapping[str, tuple[list[Row], list[Target]]]:
    if given.slow_link is not None:
        script = Path(given.slow_link) if given.slow_link else None
        return {"slow link": slow_table(script, given.rounds, scratch)}
    return {
        "synthesised": synthesis_table(),
        "priced": (price_table(), against_known()),
        "played": played_table(scratch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="to FILE, or stdout")
    parser.add_argument("--slow-link", nargs="?", const="", metavar="SCRIPT")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if given.slow_link is not None and (missing := two_hosts.missing()):
        print(f"skipped: two hosts need {missing}")
        return
    with tempfile.TemporaryDirectory() as kept:
        made = tables(given, Path(kept))
    every = [target for _, targets in made.values() for target in targets]
    rows = [{"table": name, **row} for name, (rows, _) in made.items() for row in rows]
    if given.json != "-":
        for rows_of, targets in made.values():
            show(rows_of, targets, as_json=False)
    if given.json is not None:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            show(rows, every, as_json=True)
        if given.json == "-":
            print(text.getvalue(), end="")
        else:
            Path(given.json).write_text(text.getvalue())
    sys.exit(any(not target.met for target in every))


if __name__ == "__main__":
    main()
