"""How a program calls a primitive that has no kind again: `autopar.rules.called` has the text.

A text is taken only if it traces to the very equation that it is for: the same primitive with the
same parameters on the same operands.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autopar.frontends.jax.draft import Operand, Uniform
from autopar.frontends.jax.shardy import rule_of
from autopar.nouns.graph import Graph, Op, with_ops
from autopar.rules.advice import is_random, unwritable
from autopar.rules.called import (
    ALL,
    CALL,
    LIFTED,
    RULE,
    WINDOW,
    window_of,
    written,
)
from autopar.rules.kept_whole import MARK
from autopar.rules.registry import UnruledOp, rule_for

SKIPPED = ("update_jaxpr", "update_consts", "out_sharding", "sharding")
"""Parameters that follow from the others, or that a loss of one device leaves empty."""
ONE_PRECISION = frozenset(("bitcast_convert_type", "clz"))
"""What is another function of numbers of 64 bits: no program of it could be verified."""
MORE = {"eigh": "symmetrize_input=False"}
"""What functions do besides, unless they are told."""
PLACES = {"dynamic_slice": 1, "dynamic_update_slice": 2}
"""From which operand on they are places, one for each dim."""
NOT_FROM_THE_END = "allow_negative_indices=False"
SUMMED = ("scatter-add", "scatter_add")


@dataclass(frozen=True, slots=True)
class Called:
    """``operands``: those of the text, by their positions among the primitive's."""

    text: str
    operands: tuple[int, ...]
    window: tuple[int, ...] = ()
    rule: str = ""

    @property
    def attrs(self) -> dict[str, Any]:
        window = {WINDOW: self.window} if self.window else {}
        return {CALL: self.text, **window, **({RULE: self.rule} if self.rule else {})}


class Unwritten(ValueError):
    """A parameter that has no text in a program."""


def call_again(name: str, params: Mapping[str, Any], inputs: Sequence[Operand]) -> Called | None:
    """The call of a primitive with its rule; None where no text is that primitive again."""
    if name in ONE_PRECISION:
        return None
    # A number in the place of a tensor is written where it is one of places, and made elsewhere.
    given = tuple(
        (x.shape, x.dtype, x.value if isinstance(x, Uniform) and not x.shape else None)
        for x in inputs
    )
    shown = tuple((k, _Shown(v)) for k, v in sorted(params.items()))
    zeros = name in SUMMED and isinstance(inputs[0], Uniform) and _is_zero(inputs[0].value)
    return _called(name, shown, given, zeros, bool(jax.config.read("jax_enable_x64")))


def _is_zero(value: bool | int | float) -> bool:
    return not isinstance(value, bool) and value == 0


@dataclass(frozen=True, slots=True, eq=False)
class _Shown:
    """A parameter, known by its text."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shown) and _shown(self.value) == _shown(other.value)

    def __hash__(self) -> int:
        return hash(_shown(self.value))


@lru_cache(maxsize=1024)
def _called(
    name: str,
    shown: tuple[tuple[str, _Shown], ...],
    given: tuple[tuple[tuple[int, ...], str, Any], ...],
    zeros: bool,
    wide: bool,
) -> Called | None:
    del wide  # equal calls of another width are others
    params = {k: v.value for k, v in shown}
    try:
        made = _text(name, params, given, zeros)
    except Unwritten:
        return None
    if made is None:
        return None
    shapes = [jax.ShapeDtypeStruct(given[i][0], given[i][1]) for i in made.operands]
    out = given[0][0] if zeros else ()

    def function(*operands: Any) -> Any:
        return evaluated(made.attrs, operands, out)

    if not _traces_to(function, shapes, name, params, zeros):
        return None
    return Called(made.text, made.operands, made.window, rule_of(function, shapes, zeros))


def evaluated(
    attrs: Mapping[str, Any], operands: Sequence[Any], made: Sequence[int], wide: bool = False
) -> tuple[Any, ...]:
    """The results of a call on ``operands``, ``made`` the extents of the first one; ``wide``: in
    float64."""
    op = Op("", (), ("",), attrs)
    dtypes = {name: f'"{"float64" if wide else dtype}"' for dtype, name in LIFTED.items()}
    names = [f"x[{i}]" for i in range(len(operands))]
    window = str(window_of(op, operands[0].shape)) if WINDOW in attrs else ""
    line = written(op, names, dtypes, window, str(tuple(made)))
    results = eval(line, {"lax": jax.lax, "jnp": jnp, "x": operands})
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def apart_whole(graph: Graph) -> Graph:
    """Ops without a rule that read nothing but parameters, constants and what is made of them are
    whole: no sample is in them, and each rank computes them once, as one device does. Of a rule
    that a user registered they have one."""

    def marked(part: Graph, op: Op) -> Op:
        apart = _is_unruled(part, op) and _reads_no_sample(part, op)
        return replace(op, attrs={**op.attrs, MARK: True}) if apart else op

    return with_ops(graph, marked)


def _is_unruled(part: Graph, op: Op) -> bool:
    """Whether no rule is known for what a program can say again, and draws no random numbers."""
    if op.kind == "block" or is_random(op.kind) or unwritable(op):
        return False
    try:
        rule_for(op, part.tensors)
    except UnruledOp:
        return True
    return False


def _reads_no_sample(part: Graph, op: Op) -> bool:
    """In a block, whose inputs may come from the batch, that no input is read."""
    makers = {name: made for made in part.ops for name in made.outputs}
    todo, seen = list(op.inputs), set[str]()
    while todo:
        name = todo.pop()
        if name in seen or part.tensors[name].role in ("parameter", "buffer"):
            continue
        seen.add(name)
        if name not in makers or makers[name].kind == "block":
            return False
        todo.extend(makers[name].inputs)
    return True


def widened_call(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attrs of the same call in float64."""
    text: str = attrs[CALL]
    for name in LIFTED.values():
        text = text.replace(f"{{{name}}}", '"float64"')
    return {**attrs, CALL: text}


def _as_dtype(name: str, value: Any) -> Any:
    """A dtype that may be given by its name."""
    return np.dtype(value) if name == "preferred_element_type" and value is not None else value


def _traces_to(
    function: Callable[..., Any],
    shapes: Sequence[Any],
    name: str,
    params: Mapping[str, Any],
    zeros: bool,
) -> bool:
    """Whether the call is one equation of that primitive, or several of which the last one is where
    it makes its own ``zeros``."""
    try:
        jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    except Exception:  # whatever a function of JAX raises of what it cannot take
        return False
    while len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "jit":
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    if not jaxpr.eqns or (len(jaxpr.eqns) > 1 and not zeros):
        return False
    eqn = jaxpr.eqns[-1]
    values = [v for v in eqn.invars[zeros:] if not isinstance(v, jex.Literal)]
    return (
        eqn.primitive.name == name
        and values == list(jaxpr.invars)
        and list(eqn.outvars) == list(jaxpr.outvars)
        and {k: _shown(_as_dtype(k, v)) for k, v in eqn.params.items()}
        == {k: _shown(_as_dtype(k, v)) for k, v in params.items()}
    )


def _shown(value: Any) -> str:
    """A parameter as text: integers of numpy, as `jax.vmap` leaves them, are integers."""
    try:
        return _value(value)
    except Unwritten:
        return str(value)


# -- the text ------------------------------------------------------------------------------------


def _text(name: str, params: Mapping[str, Any], given: Sequence[Any], zeros: bool) -> Called | None:
    plain = name.replace("-", "_")
    function = _function(plain)
    if function is None:
        return None
    where, callable_ = function
    if plain in PLACES:
        return _by_place(plain, params, given)
    known = inspect.signature(callable_).parameters if callable_ is not None else {}
    window: tuple[int, ...] = ()
    options = []
    for key, value in params.items():
        if key in SKIPPED:
            continue
        if key == "slice_sizes":
            window = tuple(
                ALL if size == n else int(size) for size, n in zip(value, given[0][0], strict=True)
            )
            options.append("slice_sizes={window}")
            continue
        if known and key not in known:
            if value is None:
                continue
            return None
        default = known[key].default if known else inspect.Parameter.empty
        if default is inspect.Parameter.empty or str(default) != str(value):
            options.append(f"{key}={_value(value)}")
    operands = tuple(range(1 if zeros else 0, len(given)))
    texts = [f"{{{i}}}" for i in range(len(operands))]
    options += [MORE[name]] if name in MORE else []
    if zeros:
        texts.insert(0, f"jnp.zeros({{made}}, {_dtype(given[0][1])})")
    return Called(f"{where}({', '.join([*texts, *options])})", operands, window)


def _function(name: str) -> tuple[str, Callable[..., Any] | None] | None:
    """The function of a primitive as a program writes it, and itself where it has a signature."""
    for text, module in (("lax", jax.lax), ("lax.linalg", jax.lax.linalg)):
        if callable(function := getattr(module, name, None)):
            return f"{text}.{name}", function
    if hasattr(jax.lax, f"{name}_p"):
        return f"lax.{name}_p.bind", None
    return None


def _by_place(name: str, params: Mapping[str, Any], given: Sequence[Any]) -> Called | None:
    """A slice at places that are numbers of the run, along one dim or several."""
    first = PLACES[name]
    starts = given[first:]
    dims = [d for d, (_, _, value) in enumerate(starts) if value is None or value != 0]
    sizes = params["slice_sizes"] if first == 1 else given[1][0]
    operands = [f"{{{i}}}" for i in range(first)]
    same = all(n == given[0][0][d] for d, n in enumerate(sizes) if d not in dims)
    if len(dims) == 1 and same:
        (dim,) = dims
        known = starts[dim][2]
        size = [str(int(sizes[dim]))] if first == 1 else []
        place = f"{{{first}}}" if known is None else str(int(known))
        more = [place, *size, f"axis={dim}", *[NOT_FROM_THE_END] * (known is None)]
        text = f"lax.{name}_in_dim({', '.join([*operands, *more])})"
        return Called(text, (*range(first), *[first + dim] * (known is None)))
    chosen = list(range(first))
    places = []
    for i, (_, dtype, value) in enumerate(starts, first):
        # Under 64-bit types sums of integers are wider, and all places have to be of one type.
        places.append(f"jnp.{dtype}({f'{{{len(chosen)}}}' if value is None else int(value)})")
        chosen += [i] * (value is None)
    comma = "," * (len(places) == 1)
    options = [f"({', '.join(places)}{comma})"]
    window: tuple[int, ...] = ()
    if first == 1:
        options.append("{window}")
        window = tuple(
            ALL if size == n else int(size) for size, n in zip(sizes, given[0][0], strict=True)
        )
    options.append(NOT_FROM_THE_END)
    return Called(f"lax.{name}({', '.join([*operands, *options])})", tuple(chosen), window)


def _value(value: Any) -> str:
    """Source text of a parameter. Raises `Unwritten`."""
    if isinstance(value, enum.Enum):
        if type(value) is jax.lax.GatherScatterMode:
            return f'"{value.name.lower().removesuffix("_or_drop")}"'
        kind = type(value).__name__
        if hasattr(jax.lax, kind):
            return f"lax.{kind}.{value.name}"
        raise Unwritten(kind)
    if isinstance(value, np.dtype | type) or _is_dtype(value):
        return _dtype(str(np.dtype(value)))
    kind = type(value).__name__
    if getattr(jax.lax, kind, None) is type(value):
        return _numbers(value, f"lax.{kind}")
    if isinstance(value, tuple | list):
        inner = [_value(v) for v in value]
        return f"({', '.join(inner)}{',' * (len(inner) == 1)})"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value).replace("nan", "jnp.nan").replace("inf", "jnp.inf")
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise Unwritten(kind)


def _is_dtype(value: Any) -> bool:
    """``jnp.float32`` and its like, which are no types."""
    return callable(value) and isinstance(getattr(value, "dtype", None), np.dtype)


def _numbers(value: Any, name: str) -> str:
    """Dimension numbers: a record of `jax.lax`, what it has by default left out."""
    options = []
    for key, parameter in inspect.signature(type(value)).parameters.items():
        own = getattr(value, key)
        if parameter.default is inspect.Parameter.empty or str(own) != str(parameter.default):
            options.append(f"{key}={_value(own)}")
    return f"{name}({', '.join(options)})"


def _dtype(name: str) -> str:
    return f"{{{LIFTED[name]}}}" if name in LIFTED else f'"{name}"'
