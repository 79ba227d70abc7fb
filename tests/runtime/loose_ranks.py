"""Starts ranks of a job as other machines would: nobody stops those that are left when one dies.

python -m tests.runtime.loose_ranks RANKS SCRIPT ARGUMENTS...
python -m tests.runtime.loose_ranks RANKS -m MODULE ARGUMENTS...

What ranks import is imported once, before there is a thread; ranks are forked from this process.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
from importlib.util import find_spec

from tests.warm_ranks import IMPORTED_BY_RANKS


def main() -> int:
    ranks, *command = sys.argv[1:]
    for module in IMPORTED_BY_RANKS:
        if find_spec(module.split(".")[0]):
            importlib.import_module(module)
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for rank in range(int(ranks)):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=ranks,
                LOCAL_WORLD_SIZE=ranks,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            return _rank(command)
        started.append(pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # those are for the ranks, for which this one waits
    return int(any([os.waitpid(pid, 0)[1] for pid in started]))


def _rank(command: list[str]) -> int:
    """What `python COMMAND` does, in this process."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
