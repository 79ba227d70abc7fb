"""A forward that draws from generators of Python or NumPy: a trace has one draw, and so would every
step of a program, where the model draws anew in each. Draws of torch are ops of the trace."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from torch import nn

from autopar.frontends.pytorch.errors import HostDrawError
from autopar.frontends.shared.generators import host_generators, is_of_host, state_of

Made = TypeVar("Made")


def without_host_draws(model: nn.Module, once: Callable[[], Made]) -> Made:
    """What ``once``, which runs the forward, gives; generators are left as they were.

    Raises `HostDrawError` where the forward draws. One that seeds a generator before it draws from
    it makes the same draws each time, and what draws the first time alone is an import.
    """
    generators = _reached(model)
    before = {name: state_of(generator) for name, generator in generators.items()}
    made = once()
    after = _states(generators)
    if after == {name: pickle.dumps(state) for name, (_, state) in before.items()}:
        return made
    try:
        drawn, places = _again(generators, after, once)
    finally:
        for put_back, state in before.values():
            put_back(state)
    if not drawn:
        return made
    at = f" at {', '.join(dict.fromkeys(places))}" if places else ""
    raise HostDrawError(
        f"the forward draws from {' and '.join(drawn)}{at}: captured once, the program would have "
        "that one draw at every step, and all ranks of it. Draw by torch, as torch.rand(len(x)) < "
        "p for each sample, or in batch(step) and hand the draw to the forward as an entry"
    )


def _again(
    generators: Mapping[str, Any], after: Mapping[str, bytes], once: Callable[[], Any]
) -> tuple[list[str], list[str]]:
    """Which of them ``once`` draws from where it begins elsewhere, and does not end as it did; and
    where it calls them."""
    for generator in generators.values():
        generator.random()
    elsewhere = _states(generators)
    places: list[str] = []
    with _noted(places):
        once()
    again = _states(generators)
    return [n for n in again if again[n] not in (elsewhere[n], after[n])], places


def _reached(model: nn.Module) -> dict[str, Any]:
    """Generators that a forward is likely to draw from, by what they are called: shared ones, and
    those that modules or the files of their forwards hold."""
    held: dict[str, Any] = {}
    files: dict[int, Mapping[str, Any]] = {}
    for path, module in model.named_modules():
        held.update((f"{path}.{key}".lstrip("."), value) for key, value in vars(module).items())
        names = getattr(type(module).forward, "__globals__", {})
        files[id(names)] = names
    for names in files.values():
        held.update(names)
    return host_generators() | {name: value for name, value in held.items() if is_of_host(value)}


def _states(generators: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: pickle.dumps(state_of(g)[1]) for name, g in generators.items()}


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
        for name, generator in host_generators().items():
            module = sys.modules[name]
            for called, function in list(vars(module).items()):
                if getattr(function, "__self__", None) is generator:
                    stack.enter_context(patch.object(module, called, watched(function)))
        yield
