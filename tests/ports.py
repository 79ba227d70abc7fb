"""Ports for jobs whose ranks find one another by number."""

from __future__ import annotations

import random
import socket

BELOW_THE_SYSTEMS_OWN = range(20000, 32000)
"""A system gives ports from 32768 on (`ip_local_port_range`) to whoever asks for any: one from
there that was free may be another test's by the time that a job listens on it."""


def free_port() -> int:
    """One that nobody listens on."""
    chosen = random.SystemRandom()
    while True:
        port = chosen.choice(BELOW_THE_SYSTEMS_OWN)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
