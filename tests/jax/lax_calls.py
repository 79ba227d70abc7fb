"""What functions of JAX are called with: by templates that fit them, by hand, and as JAX's own
records of ops call them (`jax._src.internal_test_util.test_harnesses`), on a batch by `jax.vmap`.

Numbers are drawn where the function has a derivative, and then whole ones, of which many are equal,
zero, or a limit.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import jax.scipy.special
import numpy as np

from tests.jax.as_models import BATCH, Call
from tests.jax.calls_by_hand import BY_HAND

Shape = tuple[tuple[int, ...], str]
F, I, B = "float32", "int32", "bool"  # noqa: E741
X, Y = ((BATCH, 4, 6), F), ((BATCH, 4, 6), F)
ROWS, W, V, K = ((BATCH, 4), F), ((4, 6), F), ((6,), F), ((6, 8), F)
N, NI, P = ((BATCH, 4, 6), I), ((BATCH, 4, 6), I), ((BATCH, 4, 6), B)
M, MV = ((BATCH, 4, 4), F), ((BATCH, 4, 3), F)

NAMESPACES: Mapping[str, Any] = {
    "jnp": jnp,
    "jax.nn": jax.nn,
    "lax": jax.lax,
    "jax.scipy.special": jax.scipy.special,
    "jnp.linalg": jnp.linalg,
    "jax.scipy.linalg": jax.scipy.linalg,
    "jnp.fft": jnp.fft,
    "lax.linalg": jax.lax.linalg,
}
LEFT_OUT = frozenset(
    "load fromfile frombuffer fromstring from_dlpack save savez print einsum_path asarray "
    "array_repr array_str fromfunction frompyfunc vectorize apply_along_axis apply_over_axes "
    "empty empty_like get_printoptions set_printoptions printoptions block piecewise "
    "rng_uniform rng_bit_generator after_all create_token axis_index axis_size psum pmax pmin "
    "pmean all_gather all_to_all ppermute pshuffle psum_scatter pswapaxes pbroadcast pcast precv "
    "psend ragged_all_to_all dce_sink stage composite optimization_barrier device_put "
    "with_sharding_constraint platform_dependent".split()
)
"""What computes nothing, is for files, or is of several devices."""
Template = tuple[str, tuple[Shape, ...], frozenset[int], Callable[..., Any]]


def _keyword(**options: Any) -> Callable[..., Any]:
    return lambda f, *xs: f(*xs, **options)


def _plain(f: Any, *xs: Any) -> Any:
    return f(*xs)


def _listed(**options: Any) -> Callable[..., Any]:
    return lambda f, *xs: f(list(xs), **options)


def _with(*more: Any, **options: Any) -> Callable[..., Any]:
    return lambda f, *xs: f(*xs, *more, **options)


NONE: frozenset[int] = frozenset()
TEMPLATES: Sequence[Sequence[Template]] = (
    (
        ("x", (X,), NONE, _plain),
        ("rows", (ROWS,), NONE, _plain),
        ("n", (N,), NONE, _plain),
        ("p", (P,), NONE, _plain),
    ),
    (
        ("x, axis=-1", (X,), NONE, _keyword(axis=-1)),
        ("n, axis=-1", (N,), NONE, _keyword(axis=-1)),
        ("p, axis=-1", (P,), NONE, _keyword(axis=-1)),
    ),
    (("x, axis=1, keepdims", (X,), NONE, _keyword(axis=1, keepdims=True)),),
    (("x, axis=(1, 2)", (X,), NONE, _keyword(axis=(1, 2))),),
    (("x, axis=0", (X,), NONE, _keyword(axis=0)),),
    (
        ("x, y", (X, Y), NONE, _plain),
        ("x, k", (X, K), frozenset((1,)), _plain),
        ("n, n", (N, NI), NONE, _plain),
        ("p, p", (P, P), NONE, _plain),
        ("x, 2", (X,), NONE, _with(2)),
        ("x, 0.5", (X,), NONE, _with(0.5)),
        ("n, 2", (N,), NONE, _with(2)),
    ),
    (("x, v", (X, V), frozenset((1,)), _plain),),
    (("w, x", (W, X), frozenset((0,)), _plain),),
    (("n, n", (N, NI), NONE, _plain),),
    (("x, 1, axis=1", (X,), NONE, _with(1, axis=1)),),
    (
        ("x, y, z", (X, Y, X), NONE, _plain),
        ("p, x, y", (P, X, Y), NONE, _plain),
        ("x, -1, 1", (X,), NONE, _with(-1, 1)),
        ("2, x", (X,), NONE, lambda f, x: f(2, x)),
    ),
    (("[x, y]", (X, Y), NONE, _listed()),),
    (("[x, y], axis=-1", (X, Y), NONE, _listed(axis=-1)),),
    (("m", (M,), NONE, _plain),),
    (("m, mv", (M, MV), NONE, _plain), ("m, m", (M, M), NONE, _plain)),
)
"""Of each row the first that a function takes; those of matrices are for linear algebra."""


@cache
def public() -> Mapping[str, Callable[..., Any]]:
    """The functions that people call, by name; one that has several names by the first."""
    functions: dict[str, Callable[..., Any]] = {}
    known: set[int] = set()
    for space, module in NAMESPACES.items():
        for name in sorted(dir(module)):
            function = getattr(module, name)
            if name.startswith("_") or name in LEFT_OUT or not callable(function):
                continue
            if not inspect.isclass(function) and id(function) not in known:
                known.add(id(function))
                functions[f"{space}.{name}"] = function
    return functions


def by_template(name: str) -> Iterator[Call]:
    """Of a public function, those that trace to different programs."""
    function = public()[name]
    seen: set[str] = set()
    for row in TEMPLATES:
        for words, shapes, held, how in row:
            called = partial(how, function)
            matrices = words.startswith("m")
            if (matrices and "linalg" not in name) or not _takes(function, how, len(shapes)):
                continue
            text = _traced(called, shapes)
            if text is not None and text not in seen:
                yield call(f"{name}({words})", called, shapes, held, matrices, 1)
            if text is not None:
                seen.add(text)
                break


def by_hand(name: str) -> Iterator[Call]:
    function, shapes = BY_HAND[name]
    held = frozenset(i for i, (sizes, _) in enumerate(shapes) if sizes[:1] != (BATCH,))
    yield call(name, function, shapes, held)


def _takes(function: Callable[..., Any], how: Callable[..., Any], count: int) -> bool:
    """Whether a function has so many arguments, and these options."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        how(signature.bind, *range(count))
    except TypeError:
        return False
    return True


def _traced(called: Callable[..., Any], shapes: Sequence[Shape]) -> str | None:
    """The jaxpr of a call, None where it is none, or where what it makes hangs on no operand."""
    given = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jaxpr = jax.make_jaxpr(called)(*given).jaxpr
    except Exception:  # whatever functions raise of what they do not take
        return None
    read = [v for e in jaxpr.eqns for v in e.invars if any(v is x for x in jaxpr.invars)]
    return str(jaxpr) if read and any(v.aval.size for v in jaxpr.outvars) else None


# -- numbers -----------------------------------------------------------------------------------


def call(
    name: str,
    function: Callable[..., Any],
    shapes: Sequence[Shape],
    held: frozenset[int] = NONE,
    symmetric: bool = False,
    least: int = 0,
) -> Call:
    """``symmetric``: matrices that have a Cholesky factor; ``least``: the least integer of operands
    behind the first, by which that may be divided."""
    floats = any(dtype == F for _, dtype in shapes)
    draws = [_SYMMETRIC] if symmetric else [_DRAWN, _WHOLE] if floats else [_DRAWN]
    tries = [
        {
            words: [_number(draw, i, shape, least if i else 0) for i, shape in enumerate(shapes)]
            for words, draw in some.items()
        }
        for some in draws
    ]
    return Call(name, function, tuple(shapes), held, tries)


def _number(draw: Callable[[Any, Any], Any], place: int, shape: Shape, least: int) -> Any:
    rng = np.random.default_rng(place)
    sizes, dtype = shape
    if dtype == B:
        return rng.random(sizes) < 0.5
    if dtype == I:
        return rng.integers(least, 4, sizes)
    return draw(rng, sizes)


def _definite(rng: Any, sizes: Sequence[int]) -> Any:
    x = rng.normal(size=sizes)
    if len(sizes) < 2 or sizes[-1] != sizes[-2]:
        return x
    return x @ np.swapaxes(x, -1, -2) + np.diag(np.arange(1.0, sizes[-1] + 1))


_DRAWN: Mapping[str, Callable[[Any, Any], Any]] = {
    "drawn": lambda rng, sizes: rng.normal(size=sizes),
    "between 0 and 1": lambda rng, sizes: rng.uniform(0.1, 0.9, size=sizes),
    "above 1": lambda rng, sizes: rng.uniform(1.1, 2.5, size=sizes),
}
_WHOLE: Mapping[str, Callable[[Any, Any], Any]] = {
    "whole": lambda rng, sizes: rng.integers(-2, 3, sizes),
    "0 or 1": lambda rng, sizes: rng.integers(0, 2, sizes),
    "1 or 2": lambda rng, sizes: rng.integers(1, 3, sizes),
}
_SYMMETRIC: Mapping[str, Callable[[Any, Any], Any]] = {"drawn": _definite}


# -- as JAX's own tests call them --------------------------------------------------------------


@cache
def harnesses() -> Mapping[str, Sequence[Any]]:
    """By group, those of the dtypes that models have; draws of random numbers have tests of their
    own (`test_random_keys`)."""
    from jax._src.internal_test_util.test_harnesses import all_harnesses

    groups: dict[str, list[Any]] = {}
    for one in all_harnesses:
        drawn = one.group_name.startswith("random_")
        if str(np.dtype(one.dtype)) in (F, I, B) and not drawn:
            groups.setdefault(one.group_name, []).append(one)
    return groups


def of_harnesses(group: str, most: int = 4) -> Iterator[Call]:
    """Of a group ``most`` calls, of several dtypes where there are."""
    some = harnesses()[group]
    chosen = [some[i * (len(some) - 1) // max(most - 1, 1)] for i in range(most)]
    for one in dict.fromkeys(chosen):
        made = _of_harness(group, one)
        if made is not None:
            yield made


def _of_harness(group: str, one: Any) -> Call | None:
    try:
        given = one.dyn_args_maker(np.random.RandomState(0))
    except Exception:  # of a record that is for another device
        return None
    arrays = [np.asarray(x) for x in given]
    dtypes = {str(a.dtype) for a in arrays}
    if not arrays or not arrays[0].size or dtypes - {F, I, B}:
        return None
    shapes = [((BATCH, *arrays[0].shape), str(arrays[0].dtype))]
    shapes += [(a.shape, str(a.dtype)) for a in arrays[1:]]
    mapped = jax.vmap(one.dyn_fun, in_axes=(0, *[None] * (len(arrays) - 1)))
    more = [one.dyn_args_maker(np.random.RandomState(i))[0] for i in range(BATCH)]
    values = {"its own": [np.stack(more), *arrays[1:]]}
    held = frozenset(range(1, len(arrays)))
    return Call(f"{group}: {one.name}", mapped, tuple(shapes), held, [values])
