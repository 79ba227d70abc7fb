"""Values that a user's functions can reach: what planning may change while it runs them."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

DEPTH = 5  # containers and objects inside one another
ITEMS = 512  # looked at from either end of a container
LIMIT = 20_000  # values in all: some milliseconds

CACHE = type(functools.cache(len))
"""What `functools.cache` and `functools.lru_cache` make."""

_PLAIN = (int, float, complex, str, bytes, bytearray, type(None))
_LOADERS = "torch.utils.data"
_OTHERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
)
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders that packages lie in; a path file or PYTHONPATH may name one of another environment."""


class Reached(NamedTuple):
    """A value with the variable that leads to it: ``store.tensors`` in ``model.py``."""

    name: str
    file: str
    value: Any

    def __str__(self) -> str:
        return f"`{self.name}` in {self.file}"


def reachable(
    roots: Iterable[Any], closed: Callable[[Any], bool] = lambda value: False
) -> Iterator[Reached]:
    """Every value that the functions ``roots`` reach, each once, the nearest first.

    By closures, defaults, attributes of functions, and the globals that their code names, through
    functions and classes of the user's own files, containers and objects. What is inside of a
    value that is ``closed`` is not looked at, nor plain numbers and text.
    """
    queue = deque((Reached(_name_of(root), _file_of(root), root), 0) for root in roots)
    seen: dict[int, Any] = {}  # holds what it counts, so that no ``id`` comes twice
    while queue and len(seen) < LIMIT:
        reached, depth = queue.popleft()
        value = reached.value
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield reached
        if closed(value):
            continue
        for inner in _of_code(value):
            queue.append((inner, 0))
        if depth < DEPTH:
            for inner in _of_data(reached):
                queue.append((inner, depth + 1))


def _of_code(value: Any) -> Iterator[Reached]:
    """What functions and classes name."""
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield Reached(_name_of(value.func), _file_of(value.func), part)
    elif isinstance(value, MethodType):
        for part in (value.__func__, value.__self__):
            yield Reached(_name_of(value), _file_of(value.__func__), part)
    elif isinstance(value, (staticmethod, classmethod)):
        yield Reached(_name_of(value), _file_of(value.__func__), value.__func__)
    elif isinstance(value, property):
        for call in (value.fget, value.fset):
            yield Reached(_name_of(call), _file_of(call), call)
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, type):
        if _is_users_class(value):
            for name, held in list(vars(value).items()):
                if not (name.startswith("__") and isinstance(held, (*_PLAIN, dict))):
                    yield Reached(f"{value.__qualname__}.{name}", _class_file(value), held)
            for base in value.__bases__:
                yield Reached(base.__qualname__, _class_file(base), base)
    elif callable(value) and hasattr(value, "__wrapped__"):
        wrapped = value.__wrapped__
        yield Reached(_name_of(wrapped), _file_of(wrapped), wrapped)


def _of_function(function: FunctionType) -> Iterator[Reached]:
    code = function.__code__
    if not is_users(code.co_filename):
        return
    file = Path(code.co_filename).name
    own = _name_of(function)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with_value, held = _content(cell)
        if with_value:
            yield Reached(name, file, held)
    names = set(_names(code))
    for name in sorted(names):
        held = function.__globals__.get(name)
        if isinstance(held, ModuleType):
            if is_users(getattr(held, "__file__", None) or "<"):
                for inner in sorted(names & vars(held).keys()):
                    yield Reached(f"{name}.{inner}", file, vars(held)[inner])
        elif held is not None:
            yield Reached(name, file, held)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for held in defaults:
        yield Reached(f"a default of {own}()", file, held)
    for name, held in list(vars(function).items()):
        yield Reached(f"{own}.{name}", file, held)


def _of_data(reached: Reached) -> Iterator[Reached]:
    """What containers and objects hold."""
    name, file, value = reached
    if isinstance(value, Mapping):
        if isinstance(value, dict):
            for held in _ends(value):
                yield Reached(name, file, held)
                yield Reached(name, file, value[held])
        return
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        for held in _ends(value):
            yield Reached(name, file, held)
        return
    if isinstance(value, (type, FunctionType, ModuleType, CACHE)):
        return
    kind = type(value)
    users = _is_users_class(kind)
    loader = kind.__module__.startswith(_LOADERS)
    if users or loader or isinstance(value, SimpleNamespace):
        for key, held in list(_attributes(value)):
            if users or not key.startswith("_"):  # a loader keeps its workers, anew for each pass
                yield Reached(f"{name}.{key}", file, held)
    if users:
        yield Reached(kind.__qualname__, _class_file(kind), kind)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if inspect.ismemberdescriptor(vars(kind).get(name)) and hasattr(value, name):
                yield name, getattr(value, name)


def cached(cache: Any) -> list[Any]:
    """Results and arguments that a `CACHE` holds."""
    own = cache.__wrapped__, vars(cache)
    return [held for held in gc.get_referents(cache) if not any(held is o for o in own)]


def _ends(value: Any) -> list[Any]:
    if len(value) <= 2 * ITEMS:
        return list(value)
    first = list(itertools.islice(value, ITEMS))
    last = itertools.islice(reversed(value), ITEMS) if hasattr(value, "__reversed__") else ()
    return [*first, *last]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: CellType) -> tuple[bool, Any]:
    try:
        return True, cell.cell_contents
    except ValueError:  # not assigned yet
        return False, None


def is_users(file: str) -> bool:
    """Whether ``file`` is neither Python's, nor an installed package's, nor ours."""
    return not file.startswith(("<", *_OTHERS)) and _INSTALLED.isdisjoint(file.split(os.sep))


def _is_users_class(kind: type) -> bool:
    return is_users(_class_path(kind))


def _class_path(kind: type) -> str:
    """By its methods: another file may have the name of the class's module by now."""
    for held in vars(kind).values():
        if isinstance(held, FunctionType) and not held.__code__.co_filename.startswith("<"):
            return held.__code__.co_filename
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"


def _class_file(kind: type) -> str:
    return Path(_class_path(kind)).name


def _name_of(call: Any) -> str:
    return str(getattr(call, "__qualname__", type(call).__qualname__)).replace("<locals>.", "")


def _file_of(call: Any) -> str:
    if isinstance(call, type):
        return _class_file(call)
    code = getattr(call, "__code__", None)
    return Path(code.co_filename).name if code else _class_file(type(call))
