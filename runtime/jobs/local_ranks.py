"""Starts a module on every rank of this machine, as `torchrun --standalone` does for less.

    python -m autopar.runtime.jobs.local_ranks RANKS CODES -m MODULE ARGUMENTS...

To import torch with its distributed parts takes seconds of CPU, which torchrun spends once for each
rank and once for itself. Here MODULE is imported once, before there is a thread or a GPU in use,
and the ranks are forked from that process; each finds the environment that torchrun gives and calls
the ``main`` of MODULE. The first rank that fails stops the others; CODES then holds the exit codes
of all as a JSON list, and this command ends with 1. When its parent is gone, all end.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

ADDRESS = "127.0.0.1"
LOOK_S = 0.5
"""How often to look whether the parent is still there."""


def start(ranks: int, module: str, arguments: Sequence[str]) -> list[int]:
    """Runs ``main`` of a module on every rank; the exit codes, all 0 or those of a failed job.

    A code below 0 is minus the signal that ended the rank; `SIGTERM` ended those that had to stop.
    """
    parent = os.getppid()
    gc.disable()  # what is imported stays
    main = importlib.import_module(module).main
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing.spawn import (
        ProcessExitedException,
        ProcessRaisedException,
        start_processes,
    )

    gc.freeze()  # no rank looks through it, which would copy its pages
    gc.enable()
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # not of what it stops
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        given = (main, [module, *arguments], ranks, port)
        started = start_processes(  # type: ignore[no-untyped-call]
            _rank, given, ranks, join=False, start_method="fork"
        )
        # Threads only now. Ranks that come earlier wait in the socket's queue.
        store = TCPStore(
            ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=server.detach(),
        )
    try:
        while not started.join(LOOK_S):
            if os.getppid() != parent:
                for process in started.processes:
                    process.kill()
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
    except ProcessExitedException:
        pass  # the codes say it
    del store
    return [process.exitcode or 0 for process in started.processes]


def _rank(rank: int, main: Callable[[], None], argv: list[str], ranks: int, port: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # at once, in the middle of a collective too
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=ADDRESS,
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is of the process above
    )
    sys.argv = argv
    main()


def run(ranks: int, codes: Path, module: str, arguments: Sequence[str]) -> int:
    """`start`, with the codes of a failed job in a file; the exit code of this process."""
    exit_codes = start(ranks, module, arguments)
    if any(exit_codes):
        codes.write_text(json.dumps(exit_codes))
    return int(any(exit_codes))


if __name__ == "__main__":
    _ranks, _codes, _, _module, *_arguments = sys.argv[1:]
    _code = run(int(_ranks), Path(_codes), _module, _arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # To take apart what is frozen takes long, or libraries complain that it is still there.
    os._exit(_code)
