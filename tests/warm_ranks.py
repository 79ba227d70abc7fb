"""Jobs of the tests start warm, see `tests.warm`: those of `autopar.runtime.jobs.pytorch_launch`,
and those that tests start by a command of their own."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.jobs import jax_launch, pytorch_launch
from tests import warm
from tests.ports import free_port


def with_its_ranks(command: Sequence[str]) -> int:
    """`pytorch_launch.with_its_ranks` for what its `local_launcher` starts, with less to import."""
    return warm.code_of(warm.start(_host, _job(command), (1, 2)))


def jax_worker(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """`jax_launch.worker`, likewise."""
    return python_of_jax(["-m", jax_launch.WORKER, *arguments], environment)


def python_of_jax(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of ``python WORDS`` that sees the devices which this environment gives."""
    return warm.code_of(warm.start(_of_jax, [words], (1, 2), environment=environment))


def results_of(module: str, folder: Path, ranks: int = 4) -> dict[str, Any]:
    """What ``module``'s ``main``, on all ranks, left in the results.json of ``folder``."""
    log = folder / "log.txt"
    with log.open("wb") as to:
        job = (ranks, folder / "exit_codes.json", module, [str(folder)])
        code = warm.code_of(warm.start(_host, job, (to, to)))
    assert code == 0, log.read_text()[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    for name, result in results.items():
        if isinstance(result, dict) and "failed" in result:
            pytest.fail(f"{name}:\n{result['failed']}")
    return results


def autopar(words: Sequence[str]) -> int:
    """``python -m autopar WORDS`` in this process, from which its ranks are forked."""
    pytorch_launch.with_its_ranks = _forked
    return warm.python(["-m", "autopar", *words])


def loose(ranks: int, words: Sequence[str], codes: Path | None = None) -> int:
    """Ranks of ``python WORDS`` as other machines start them: nobody stops those that are left when
    one dies. They are forked from this process; 1 if any fails. ``codes``: gets how each ended."""
    gc.freeze()
    port = free_port()
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            return warm.python(words)
        started.append(pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # those are for the ranks, for which this one waits
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    if codes is not None:
        codes.write_text(json.dumps(ended))
    return int(any(ended))


def _of_jax(words: Sequence[str]) -> int:
    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))  # was read at import
    return warm.python(words)


def _job(command: Sequence[str]) -> tuple[int, Path, str, list[str]]:
    start = pytorch_launch.local_launcher(0, Path())
    assert list(command[: len(start) - 2]) == list(start[:-2])
    ranks, codes, _, module, *arguments = command[len(start) - 2 :]
    return int(ranks), Path(codes), module, arguments


def _forked(command: Sequence[str]) -> int:
    pid = os.fork()
    if pid == 0:
        _host(*_job(command))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _host(ranks: int, codes: Path, module: str, arguments: list[str]) -> int:
    from autopar.runtime.jobs.local_ranks import run

    os._exit(run(ranks, codes, module, arguments))
