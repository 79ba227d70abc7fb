"""Pins that an error proposes, tried before they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.cli.progress import progress
from autopar.nouns.errors import UserError
from autopar.nouns.layout import pairs_text


def tried(
    error: UserError, pins: Mapping[str, str], plan: Callable[[Mapping[str, str]], str]
) -> UserError:
    """``error`` with what became of its ``instead``: beside the ``pins`` given, then alone.

    plan: what a plan of such pins is, in words; raises `UserError`.
    """
    refused = ""
    for proposed in _proposals(error.instead, pins):
        words = pairs_text(proposed)
        progress(f"trying {words} in its place")
        try:
            made = plan(proposed)
        except UserError as against:
            refused = refused or f"--fix {words} was tried too: {against.text}"
        else:
            return type(error)(f"{error.text}. --fix {words} plans: {made}")
    return type(error)(f"{error.text}. {refused}")


def _proposals(instead: Mapping[str, str], pins: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    yield {**pins, **instead}
    if set(pins) - set(instead):
        yield instead
