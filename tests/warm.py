"""Processes of the tests are forked from one that has imported what they import.

That import is most of what a small job, or a command, costs. What such a process does is what
``python WORDS`` does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

IMPORTED = [
    "autopar.runtime.jobs.pytorch_worker",
    "autopar.runtime.pytorch.program",
    "autopar.runtime.verify.pytorch.verify",
    "autopar.runtime.rehearsal.worker",
    "tests.warm_ranks",
    "autopar.frontends.pytorch",
    "autopar.cli.app",
    "autopar.planner.planning",
    "transformers.models.llama.modeling_llama",  # of examples; may be missing
    "transformers.integrations.tensor_parallel",
    "autopar.runtime.jax.step",
    "autopar.frontends.jax",
    "optax",
]
TIMEOUT_S = 500

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([name for name in IMPORTED if find_spec(name.split(".")[0])])


def start(
    target: Callable[..., int],
    arguments: Sequence[Any],
    outputs: tuple[IO[Any] | int, IO[Any] | int],
    folder: str | Path = ".",
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """A process, of a session of its own, that ends with the code which ``target`` returns; it
    writes to two files."""
    files = [DupFd(out if isinstance(out, int) else out.fileno()) for out in outputs]
    place = (dict(os.environ if environment is None else environment), str(Path(folder).resolve()))
    process = _context.Process(target=_placed, args=(target, arguments, files, *place))
    process.start()
    return process


def code_of(process: BaseProcess, seconds: float = TIMEOUT_S) -> int:
    """The exit code, as of `subprocess.Popen`; a process that has not ended by then is killed."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"process {process.pid} has not ended after {seconds} s")
    return process.exitcode


def done(
    target: Callable[..., int],
    arguments: Sequence[Any],
    folder: str | Path = ".",
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """`start`: the exit code, and what it wrote to stdout and stderr."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        code = code_of(start(target, arguments, (out, err), folder, environment))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, texts[0], texts[1]


def python(words: Sequence[str]) -> int:
    """``python WORDS`` in this process: a file or ``-m MODULE``, with its arguments."""
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _placed(
    target: Callable[..., int],
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    environment: dict[str, str],
    folder: str,
) -> None:
    os.setsid()
    for to, output in enumerate(outputs, 1):
        os.dup2(output.detach(), to)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.exit(target(*arguments))
