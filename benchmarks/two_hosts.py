"""Two hosts on this machine: network namespaces joined by a narrow link.

    python -m benchmarks.two_hosts HOST_A HOST_B SHARES -m MODULE ARGUMENT...

runs a module on two processes of either host, as `torchrun` on two nodes does. `hosts` makes the
hosts: a pair of virtual devices that let 1 Gbit/s through, each way, and a fixed share of a core
for each process (`benchmarks.core_share`; SHARES is its folder). Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.runtime.jobs.pytorch_launch import Launcher
from benchmarks import core_share

RATE, PER_HOST = "1gbit", 2
DEVICE, PORT = "wire", 29577


def missing() -> str:
    """What this machine lacks; empty where nothing."""
    if os.name != "posix" or os.geteuid() != 0:
        return "root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} (Debian's iproute2)"
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return core_share.missing()


@contextmanager
def hosts(rate: str = RATE) -> Iterator[Launcher]:
    """The two hosts while the context lasts, as the launcher of jobs on them.

    rate: of the link, each way, as ``tc`` writes it.
    """
    names = [f"host{side}{os.getpid()}" for side in "ab"]
    a, b = names
    with core_share.shares(2 * PER_HOST) as folder, _joined(a, b, rate):
        yield (sys.executable, "-m", "benchmarks.two_hosts", a, b, folder)


def arguments(doc: str | None, rounds: int, steps: int) -> argparse.ArgumentParser:
    """Those of a benchmark that trains on two hosts, with its numbers of rounds and steps."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--profile", type=Path, help="measured into it where it does not exist")
    parser.add_argument("--json", action="store_true")
    return parser


def run(
    given: argparse.Namespace,
    rate: str,
    benchmark: Callable[[argparse.Namespace, Path, Launcher], None],
) -> None:
    """``benchmark`` on two hosts with a link of that rate, and a folder for its files; or what this
    machine lacks for it."""
    if lacks := missing():
        print(f"skipped: two hosts need {lacks}")
        return
    with tempfile.TemporaryDirectory() as kept, hosts(rate) as launcher:
        benchmark(given, Path(kept), launcher)


@contextmanager
def _joined(a: str, b: str, rate: str) -> Iterator[None]:
    names = a, b
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", DEVICE, "netns", a, "type", "veth", "peer", DEVICE, "netns", b)
        for name in names:
            _ip("-n", name, "addr", "add", f"{_address(name)}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            queue = ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "200ms")
            _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, *queue)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _address(host: str) -> str:
    return "10.77.0.1" if host.startswith("hosta") else "10.77.0.2"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main() -> None:
    a, b, folder, _, module, *arguments = sys.argv[1:]
    command = ["-m", "benchmarks.core_share", folder, module, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE}
    jobs = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", str(PER_HOST)),
                *("--master-addr", _address(a), "--master-port", str(PORT), *command),
            ],
            env=environment,
        )
        for number, host in enumerate((a, b))
    ]
    sys.exit(max(abs(job.wait()) for job in jobs))


if __name__ == "__main__":
    main()
