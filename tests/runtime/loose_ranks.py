"""Starts ranks of a job as other machines would: nobody stops those that are left when one dies.

python -m tests.runtime.loose_ranks RANKS -m MODULE ARGUMENTS...
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main() -> int:
    ranks, *command = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(int(ranks))
    ]
    return int(any([process.wait() for process in started]))


if __name__ == "__main__":
    sys.exit(main())
