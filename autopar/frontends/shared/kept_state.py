"""What planning leaves in a user's program, beside the plan: put back, emptied, or refused.

Planning calls the workload's functions as training does later, but on arrays without values. A
cache then holds such arrays, and an iterator has lost its first batch; whatever is done next in
the same process, `verify`'s reference first of all, computes with them.
"""

from __future__ import annotations

import gc
import io
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, GeneratorType, TracebackType
from typing import Any

from autopar.frontends.shared.generators import (
    State,
    host_generators,
    is_of_host,
    state_of,
)
from autopar.frontends.shared.reachable import CACHE, Reached, cached, reachable
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload

_INDEXED: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter("")), type(iter(b"")))
_NESTED = 8  # iterators inside one another


class StateError(UserError):
    """The workload's functions keep something from call to call that planning has changed."""


class KeptState:
    """Around a capture: what it changed of the user's own state.

    without_values: whether a value is an array (or a model of arrays) that stands for one.

    On leaving, random states are put back, `functools` caches with arrays without values are
    emptied (``notes`` says so), and `StateError` names any other variable that holds one, or an
    iterator or file from which the batch was taken.
    """

    def __init__(self, workload: Workload, without_values: Callable[[Any], bool]) -> None:
        self._without_values = without_values
        self._batch = (workload.batch,)
        calls = (workload.batch, workload.model, workload.loss, workload.init)
        self._calls = [call for call in calls if call is not None]
        self._emptied: dict[str, None] = {}

    def __enter__(self) -> KeptState:
        held = list(self._reached(self._calls))
        self._random = _random_states(r.value for r in held)
        self._empty = {id(r.value): r.value for r in held if self._without_values(r.value)}
        self._places = [
            (r, _place(r.value))
            for r in self._reached(self._batch)
            if isinstance(r.value, Iterator)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for put_back, state in self._random:
            put_back(state)
        self.empty_caches()
        if error is None or isinstance(error, UserError):
            self._check_places(error)
            self._check_values(error)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"Planning filled the cache of {name}() with arrays without values, and "
            "emptied it again."
            for name in self._emptied
        )

    def empty_caches(self) -> None:
        """A cache's function makes what it held again; so nothing is lost but time."""
        for reached in self._reached(self._calls):
            if isinstance(reached.value, CACHE):
                held = self._reached(cached(reached.value))
                if any(self._without_values(inner.value) for inner in held):
                    reached.value.cache_clear()
                    self._emptied[reached.value.__wrapped__.__name__] = None

    def _reached(self, roots: Iterable[Any]) -> Iterator[Reached]:
        return reachable(roots, self._without_values)

    def _check_places(self, cause: BaseException | None) -> None:
        before = {id(r.value) for r, _ in self._places}
        moved = [r for r, place in self._places if not _same(place, _place(r.value))]
        moved += [
            r
            for r in self._reached(self._batch)
            if isinstance(r.value, Iterator) and id(r.value) not in before
        ]
        for reached in moved:
            file = isinstance(reached.value, io.IOBase)
            what = "the open file" if file else f"the {type(reached.value).__name__}"
            inside = "open the file" if file else "make the iterator"
            raise StateError(
                f"batch() takes from {what} {reached}, which goes on from call to call: planning "
                "has taken its first batch, so training would begin with another one. "
                f"{inside.capitalize()} inside of batch(), as in {_fresh(file)}, choose by the "
                "number of the step (def batch(step=0)), or return zeros of the same shapes"
            ) from cause

    def _check_values(self, cause: BaseException | None) -> None:
        for reached in self._reached(self._calls):
            if self._without_values(reached.value) and id(reached.value) not in self._empty:
                raise StateError(
                    f"{reached} holds a {type(reached.value).__name__} without values that "
                    "planning put there: batch, model and loss are called without memory, and "
                    "what they keep would be taken for real later. Make it without keeping it, "
                    "make it where the file is loaded, or put functools.cache on the function "
                    "that makes it, which is emptied again"
                ) from cause


def _fresh(file: bool) -> str:
    return "with open(path) as file" if file else "next(iter(loader))"


def _random_states(values: Iterable[Any]) -> list[State]:
    """Of the random numbers of Python, NumPy and torch, and of ``values``."""
    states = [state_of(generator) for generator in host_generators().values()]
    torch = sys.modules.get("torch")
    if torch is not None:
        states.append((torch.set_rng_state, torch.get_rng_state()))
    for value in values:
        if is_of_host(value) or (torch is not None and isinstance(value, torch.Generator)):
            states.append(state_of(value))
    return states


class _It:
    """A value that is compared by identity, and kept so that its ``id`` is its own."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _place(value: Any, nested: int = 0) -> tuple[Any, ...]:
    """Where an iterator stands; nothing is taken from it."""
    if isinstance(value, io.IOBase):
        return _file_place(value)
    if isinstance(value, _INDEXED):
        return tuple(_mark(part, nested) for part in value.__reduce__()[1:])
    if isinstance(value, itertools.count):
        return (repr(value),)
    held: list[Any] = [operator.length_hint(value, -1)] if hasattr(value, "__length_hint__") else []
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        held.append(None if frame is None else frame.f_lasti)
    if not isinstance(getattr(value, "__dict__", None), dict):
        held += [part for part in gc.get_referents(value) if not isinstance(part, FrameType)]
    else:
        held += itertools.chain.from_iterable(vars(value).items())
    return tuple(_mark(part, nested) for part in held)


def _file_place(file: io.IOBase) -> tuple[Any, ...]:
    try:
        return (file.closed, file.tell() if not file.closed and file.readable() else None)
    except (OSError, ValueError) as error:  # a terminal, or lines are being read from it
        return (False, type(error).__name__, _mark(getattr(file, "buffer", None), 0))


def _mark(part: Any, nested: int) -> Any:
    if isinstance(part, (int, float, str, bytes, type(None))):
        return part
    if isinstance(part, tuple):
        return tuple(_mark(inner, nested) for inner in part)
    if isinstance(part, Iterator) and nested < _NESTED:
        return _place(part, nested + 1)
    return _It(part)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, _It) and isinstance(second, _It):
        return first.value is second.value
    return type(first) is type(second) and bool(first == second)
