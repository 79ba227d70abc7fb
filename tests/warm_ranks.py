"""Jobs of the tests start from one process that has imported what ranks import.

That import is most of what a small job costs. `autopar.runtime.jobs.pytorch_launch` pays it for
every job; jobs that tests start by a command of their own do too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.jobs.pytorch_launch import local_launcher

IMPORTED_BY_RANKS = [
    "autopar.runtime.jobs.pytorch_worker",
    "autopar.frontends.pytorch",
    "transformers.models.llama.modeling_llama",  # of `examples/03_llama.py`; may be missing
]

TIMEOUT_S = 500

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTED_BY_RANKS)


def with_its_ranks(command: Sequence[str]) -> int:
    """`pytorch_launch.with_its_ranks` for what its `local_launcher` starts, with less to import."""
    start = local_launcher(0, Path())
    assert list(command[: len(start) - 2]) == list(start[:-2])
    ranks, codes, _, module, *arguments = command[len(start) - 2 :]
    return _ended(int(ranks), Path(codes), module, arguments, (1, 2))


def results_of(module: str, folder: Path, ranks: int = 4) -> dict[str, Any]:
    """What ``module``'s ``main``, on all ranks, left in the results.json of ``folder``."""
    log = folder / "log.txt"
    with log.open("wb") as to:
        files = (to.fileno(), to.fileno())
        code = _ended(ranks, folder / "exit_codes.json", module, [str(folder)], files)
    assert code == 0, log.read_text()[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    for name, result in results.items():
        if isinstance(result, dict) and "failed" in result:
            pytest.fail(f"{name}:\n{result['failed']}")
    return results


def _ended(
    ranks: int, codes: Path, module: str, arguments: list[str], outputs: tuple[int, int]
) -> int:
    """The exit code of a job that writes to two files of this process."""
    job = (ranks, codes, module, arguments)
    place = (dict(os.environ), os.getcwd(), [DupFd(output) for output in outputs])
    process = _context.Process(target=_host, args=(*job, *place))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"{module} on {ranks} ranks has not ended after {TIMEOUT_S} s")
    return process.exitcode


def _host(
    ranks: int,
    codes: Path,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    outputs: list[Any],
) -> None:
    for to, output in enumerate(outputs, 1):
        os.dup2(output.detach(), to)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from autopar.runtime.jobs.local_ranks import run

    os._exit(run(ranks, codes, module, arguments))
