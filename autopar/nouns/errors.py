"""The two ways in which a command ends without doing what was asked.

A `UserError` is for whoever typed the command: its text says what was asked, the numbers, and the
next thing to try. The CLI prints that text, without a traceback, and exits with ``exit_code``.
Anything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar


class UserError(Exception):
    """Something in the request cannot be; ``str(error)`` is the whole message.

    instead: pins with which it may be, as ``tp=1``; nobody has tried them yet. `autopar plan` does
             before it names them (`autopar.cli.instead`).
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, text: str = "", instead: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.instead = dict(instead or {})

    @property
    def text(self) -> str:
        """The message without the pins."""
        return super().__str__()

    def __str__(self) -> str:
        pins = ",".join(f"{name}={value}" for name, value in self.instead.items())
        return f"{self.text}, or plan with --fix {pins} (not tried)" if pins else self.text


class DoesNotFit(UserError):
    """No plan keeps to the memory limit: what is short, by how much, the cheapest change."""

    exit_code: ClassVar[int] = 3


def first_of(names: Iterable[str], most: int) -> str:
    """``a, b and 3 more``: each name once, and so many of them at most."""
    each = list(dict.fromkeys(names))
    more = f" and {len(each) - most} more" if len(each) > most else ""
    return ", ".join(each[:most]) + more


def did_you_mean(word: str, names: Iterable[str], alike: float = 0.6) -> str:
    """``"Did you mean x? "`` where ``word`` is nearly one of ``names``, else nothing.

    alike: how much of both must agree, from 0 to 1.
    """
    near = difflib.get_close_matches(word, list(names), 1, alike)
    return f"Did you mean {near[0]}? " if near else ""
