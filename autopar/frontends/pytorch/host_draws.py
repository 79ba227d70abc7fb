"""A forward that draws from generators of Python or NumPy: a trace has one draw, and so would every
step of a program, where the model draws anew in each. Draws of torch are ops of the trace."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from torch import nn

from autopar.frontends.pytorch.errors import HostDrawError

_OWN = (random.Random, np.random.Generator, np.random.RandomState)
_SHARED: Mapping[str, Any] = {"Python's random": random, "numpy.random": np.random}
Made = TypeVar("Made")


def without_host_draws(model: nn.Module, once: Callable[[], Made]) -> Made:
    """What ``once``, which runs the forward, gives.

    Raises `HostDrawError` where the forward draws. One that seeds a generator before it draws from
    it makes the same draws each time, and what draws the first time alone is an import.
    """
    before = _states(model)
    made = once()
    after = _states(model)
    if after == before:
        return made
    places: list[str] = []
    for generator in _generators(model).values():
        generator.random()  # elsewhere, so that draws are others
    elsewhere = _states(model)
    with _noted(places):
        once()
    again = _states(model)
    drawn = [
        name
        for name, state in again.items()
        if state != elsewhere.get(name, before.get(name)) and state != after.get(name)
    ]
    if not drawn:
        return made
    at = f" at {', '.join(dict.fromkeys(places))}" if places else ""
    raise HostDrawError(
        f"the forward draws from {' and '.join(drawn)}{at}: captured once, the program would have "
        "that one draw at every step, and all ranks of it. Draw by torch, as torch.rand(len(x)) < "
        "p for each sample, or in batch(step) and hand the draw to the forward as an entry"
    )


def _generators(model: nn.Module) -> dict[str, Any]:
    """Those that a forward is likely to draw from, by what they are called: shared ones, and those
    that modules or the files of their forwards hold."""
    named: dict[str, Any] = dict(_SHARED)
    for path, module in model.named_modules():
        held = [(f"{path}.{key}".lstrip("."), value) for key, value in vars(module).items()]
        forward = getattr(type(module), "forward", None)
        held += list(getattr(forward, "__globals__", {}).items())
        named.update((n, v) for n, v in held if isinstance(v, _OWN) and not _is_stateless(v))
    return named


def _is_stateless(generator: Any) -> bool:
    return isinstance(generator, random.SystemRandom)


def _states(model: nn.Module) -> dict[str, bytes]:
    return {name: pickle.dumps(_state(g)) for name, g in _generators(model).items()}


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


@contextmanager
def _noted(places: list[str]) -> Iterator[None]:
    """Inside, the lines that call functions of the shared generators by their modules."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for module in _SHARED.values():
            for name, function in list(vars(module).items()):
                if isinstance(getattr(function, "__self__", None), _OWN):
                    stack.enter_context(patch.object(module, name, watched(function)))
        yield
