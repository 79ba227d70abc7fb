"""`autopar profile`: measures ops and collectives on the devices at hand, into a profile.

One process a device (torchrun, gloo on CPU, NCCL on GPUs); every op is measured while all processes
run it, as a training step would. Each figure is stored as soon as it is known, and what the profile
already holds for this machine is not measured again, so an interrupted run goes on where it ended.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from autopar.cluster_file import load_cluster
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb, ProfileError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
_SIZES = tuple(1 << power for power in range(10, 26, 3))  # 1 KiB to 32 MiB


def profile_cluster(
    cluster: str | Path, database: str | Path, progress: Callable[[str], None] = print
) -> str:
    """Measure the devices of `cluster` that this machine has; returns a line that sums it up.

    Raises:
        ProfileError: the cluster's devices are not here, or the measuring processes failed.
    """
    described = load_cluster(cluster)
    local = load_cluster("local")
    if described.device.name != local.device.name or described.device_count > local.device_count:
        raise ProfileError(
            f"{described.name} has {described.device_count} x {described.device.name}, "
            f"this machine {local.device_count} x {local.device.name}; "
            "profile where the devices are"
        )
    count = described.device_count
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={count}", "-m", "autopar.profile", str(database)),
        described.device.name,
    ]
    progress(f"measuring {count} x {described.device.name}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            progress(line.rstrip())
        errors = process.stderr.read()
    if process.returncode:
        tail = "\n".join(errors.strip().splitlines()[-5:])
        raise ProfileError(f"measuring stopped; what was measured is in {database}. {tail}")
    with ProfileDb(database, progress) as db:
        machine = db.machines()[-1]
        return f"{len(db.measurements(machine))} measurements of {machine.id} in {database}"


def libraries() -> str:
    """Versions that a measurement depends on; torch is imported."""
    import torch

    cuda = f" cuda {torch.version.cuda}" if torch.cuda.is_available() else ""
    return f"torch {torch.__version__}{cuda}"


def _driver() -> str:
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(0).name)
    return f"{platform.system()} {platform.release()}"


class _Bench:
    """Times calls on every rank at once and stores the slowest rank's median on rank 0."""

    def __init__(self, database: str, device_name: str) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.on_gpu = torch.cuda.is_available()
        dist.init_process_group("nccl" if self.on_gpu else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.where = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.where)
        torch.set_num_threads(1)
        self.machine = Machine(device_name, _driver(), libraries())
        self.database = database
        held: list[Any] = [None]
        if self.rank == 0:
            with ProfileDb(database, self.say) as db:
                held[0] = db.done(self.machine)
        dist.broadcast_object_list(held)
        self.done: set[tuple[str, str, float, float]] = held[0]

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def measure(
        self, subject: str, key: str, size_bytes: float, flops: float, call: Callable[[], Any]
    ) -> None:
        """Run `call` until half a second or 30 repeats have gone by; short ops many at a time."""
        if (subject, key, size_bytes, flops) in self.done:
            return
        for _ in range(2):
            call()
        inner = self._inner(call) if subject == "op" else 1
        times: list[float] = []
        enough = self.torch.zeros(1)
        started = time.perf_counter()
        while not enough.item():
            self.dist.barrier()
            before = time.perf_counter()
            for _ in range(inner):
                call()
            if self.on_gpu:
                self.torch.cuda.synchronize()
            times.append((time.perf_counter() - before) / inner)
            late = time.perf_counter() - started > 0.5
            enough[0] = float(len(times) >= 30 or (late and len(times) >= 5))
            self.dist.broadcast(enough if not self.on_gpu else enough.to(self.where), 0)
        slowest = self.torch.tensor(times, dtype=self.torch.float64, device=self.where)
        self.dist.all_reduce(slowest, op=self.dist.ReduceOp.MAX)
        if self.rank == 0:
            values = sorted(slowest.tolist())
            tenths = quantiles(values, n=10)
            middle = values[len(values) // 2]
            now = datetime.now(UTC).isoformat(timespec="seconds")
            spread = (tenths[-1] - tenths[0]) / middle
            with ProfileDb(self.database) as db:
                db.add(
                    self.machine,
                    Measurement(subject, key, size_bytes, flops, middle, spread, len(values), now),
                )
            self.say(f"{subject} {key} {size_bytes:.3g} B: {middle * 1e6:.1f} us")

    def _inner(self, call: Callable[[], Any]) -> int:
        """Calls in a row that take about a millisecond, the same on every rank."""
        before = time.perf_counter()
        call()
        if self.on_gpu:
            self.torch.cuda.synchronize()
        took_s = max(1e-6, time.perf_counter() - before)
        count = self.torch.tensor(
            [max(1, min(200, int(1e-3 / took_s)))], dtype=self.torch.int64, device=self.where
        )
        self.dist.broadcast(count, 0)
        return int(count.item())


def _ops(bench: _Bench) -> Iterator[tuple[str, float, float, Callable[[], Any]]]:
    """(key, bytes moved, FLOPs, call) of each op to measure."""
    torch, where = bench.torch, bench.where
    scale = 8 if bench.on_gpu else 1
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if not bench.on_gpu:
        dtypes["fp64"] = torch.float64
    for name, dtype in dtypes.items():
        width = torch.empty((), dtype=dtype).element_size()
        for m, k, n in (
            (8, 8, 8),
            (128, 256, 256),
            (256, 512, 512),
            (512, 512, 2048),
            (1024, 1024, 1024),
        ):
            m, k, n = m * scale, k * scale, n * scale
            a = torch.randn(m, k, device=where, dtype=dtype)
            b = torch.randn(k, n, device=where, dtype=dtype)
            moved = width * (m * k + k * n + m * n)
            yield f"matmul {name} {m}x{k}x{n}", moved, 2.0 * m * k * n, partial(torch.matmul, a, b)
        for heads, seq, dim in ((1, 16, 16), (4, 128, 64), (8, 256, 64)):
            seq *= scale
            q = torch.randn(1, heads, seq, dim, device=where, dtype=dtype)
            call = torch.nn.functional.scaled_dot_product_attention
            flops = 4.0 * heads * seq * seq * dim
            yield (
                f"attention {name} {heads}x{seq}x{dim}",
                4.0 * width * q.numel(),
                flops,
                partial(call, q, q, q),
            )
        for count in (64, 1 << 14, 1 << 17, 1 << 22):
            count *= scale
            x = torch.randn(count, device=where, dtype=dtype)
            rows = x.reshape(-1, 64)
            yield (
                f"elementwise {name} {count}",
                3.0 * width * count,
                float(count),
                partial(torch.add, x, x),
            )
            yield (
                f"reduction {name} {count}",
                2.0 * width * count,
                5.0 * count,
                partial(torch.softmax, rows, -1),
            )
            picks = torch.randint(0, rows.shape[0], (rows.shape[0],), device=where)
            yield (
                f"gather {name} {count}",
                2.0 * width * count,
                0.0,
                partial(torch.nn.functional.embedding, picks, rows),
            )
        image = torch.randn(1, 16, 32, 32, device=where, dtype=dtype)
        kernel = torch.randn(32, 16, 3, 3, device=where, dtype=dtype)
        for batch in (1, 4, 16):
            x = image.repeat(batch, 1, 1, 1)
            moved = width * (x.numel() * 3 + kernel.numel())
            yield (
                f"conv {name} {batch}x16x32x32",
                moved,
                2.0 * batch * 32 * 16 * 9 * 32 * 32,
                partial(torch.nn.functional.conv2d, x, kernel, padding=1),
            )


def _collectives(bench: _Bench) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """(key, bytes, call) of each collective, over every power of two of ranks at once."""
    torch, dist, world = bench.torch, bench.dist, bench.world
    ranks = 2
    while ranks <= world and world % ranks == 0:
        mine = None
        for first in range(0, world, ranks):
            group = dist.new_group(list(range(first, first + ranks)))
            if first <= bench.rank < first + ranks:
                mine = group
        for size in _SIZES:
            count = size // 4 // ranks * ranks
            full = torch.randn(count, device=bench.where)
            other = torch.empty_like(full)
            part = torch.randn(count // ranks, device=bench.where)
            for kind in KINDS:
                call = _call(dist, kind, full, other, part, mine, bench.rank, ranks)
                yield f"{kind} {ranks}", float(count * 4), call
        ranks *= 2


def _call(
    dist: Any, kind: str, full: Any, other: Any, part: Any, group: Any, rank: int, ranks: int
) -> Callable[[], Any]:
    first = rank // ranks * ranks
    if kind == "all_reduce":
        return lambda: dist.all_reduce(other, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(full, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, full, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, full, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(full, first, group=group)
    after, before = first + (rank - first + 1) % ranks, first + (rank - first - 1) % ranks

    def send() -> None:
        jobs = [dist.isend(full, after, group=group), dist.irecv(other, before, group=group)]
        for job in jobs:
            job.wait()

    return send


def _worker(database: str, device_name: str) -> None:
    bench = _Bench(database, device_name)
    for key, moved, flops, call in _ops(bench):
        bench.measure("op", key, moved, flops, call)
    for key, size, call in _collectives(bench):
        bench.measure("collective", key, size, 0.0, call)
    bench.dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="autopar.profile")
    parser.add_argument("database")
    parser.add_argument("device")
    options = parser.parse_args()
    _worker(options.database, options.device)
