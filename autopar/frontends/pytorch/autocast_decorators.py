"""Whether a decorator, as ``@torch.autocast("cuda", enabled=False)``, turns autocast off.

It was made when its module was imported, long before a capture looks; and without the device torch
has turned off what is on, too, so that only the source still says which of the two it was.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FrameType

_RUNS = "decorate_autocast"
"""What torch puts around a function that autocast decorates."""


def is_off(frame: FrameType) -> bool:
    """Whether ``frame``, which enters autocast, runs a function all of whose decorators of that
    name say ``enabled=False``."""
    if frame.f_code.co_name == "__enter__" and frame.f_back is not None:  # of a subclass
        frame = frame.f_back
    function = frame.f_locals.get("func")
    if frame.f_code.co_name != _RUNS or function is None:
        return False
    try:
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # of a notebook, or not a statement
        return False
    decorators = getattr(defined, "decorator_list", [])
    made = [d for d in decorators if isinstance(d, ast.Call) and _name(d.func) == "autocast"]
    return bool(made) and all(_says_off(d) for d in made)


def _name(called: ast.expr) -> str:
    """``autocast`` of ``torch.amp.autocast``"""
    return ast.unparse(called).rpartition(".")[2]


def _says_off(call: ast.Call) -> bool:
    """By name, or by place: the first of ``torch.cuda.amp.autocast``, else behind the dtype."""
    given = [*call.args[:3], *(k.value for k in call.keywords if k.arg == "enabled")]
    return any(isinstance(v, ast.Constant) and v.value is False for v in given)
