"""The two ways in which a command ends without doing what was asked.

A `UserError` is for whoever typed the command: its text says what was asked, the numbers, and the
next thing to try. The CLI prints that text, without a traceback, and exits with ``exit_code``.
Anything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """Something in the request cannot be; ``str(error)`` is the whole message."""

    exit_code: ClassVar[int] = 2


class DoesNotFit(UserError):
    """No plan keeps to the memory limit: what is short, by how much, the cheapest change."""

    exit_code: ClassVar[int] = 3
