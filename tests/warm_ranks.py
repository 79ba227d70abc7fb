"""Jobs of the tests start from one process that has imported what ranks import.

That import is most of what a small job costs. `autopar.runtime.jobs.pytorch_launch` pays it for
every job; jobs that tests start by a command of their own do too.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from autopar.runtime.jobs.pytorch_launch import local_launcher

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "autopar.runtime.jobs.pytorch_worker",
        "autopar.frontends.pytorch",
        "transformers.models.llama.modeling_llama",  # of `examples/03_llama.py`; may be missing
    ]
)


def with_its_ranks(command: Sequence[str]) -> int:
    """`pytorch_launch.with_its_ranks` for what its `local_launcher` starts, with less to import."""
    start = local_launcher(0, Path())
    assert list(command[: len(start) - 2]) == list(start[:-2])
    ranks, codes, _, module, *arguments = command[len(start) - 2 :]
    job = (int(ranks), Path(codes), module, arguments)
    place = (dict(os.environ), os.getcwd(), [DupFd(1), DupFd(2)])
    process = _context.Process(target=_host, args=(*job, *place))
    process.start()
    process.join()
    assert process.exitcode is not None
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
