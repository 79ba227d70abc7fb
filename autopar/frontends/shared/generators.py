"""Generators of random numbers that a user's code may hold: those of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

State = tuple[Callable[[Any], Any], Any]
"""What sets a generator back, and to what."""


def host_generators() -> dict[str, Any]:
    """Those of Python and, where it is imported, of NumPy that all code shares, by module: both
    have their functions as methods of one."""
    modules = (name for name in ("random", "numpy.random") if name in sys.modules)
    return {name: vars(sys.modules[name])["random"].__self__ for name in modules}


def is_of_host(value: Any) -> bool:
    """Whether this is a generator of Python or NumPy that has a state."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    of_numpy = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(value, of_numpy)


def state_of(generator: Any) -> State:
    """Of one of `is_of_host`, or a `torch.Generator`."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return lambda state: setattr(bits, "state", state), bits.state
    return generator.set_state, generator.get_state()
