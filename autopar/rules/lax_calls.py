"""Primitives of JAX that a program calls again with their options: along dims that stay whole.

The options are the op's attrs, by the names that the function takes them by. Capture, rules,
trials and emission all read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule
from autopar.rules.terms import letters, one_to_one, text

Dims = Callable[[Mapping[str, object], int], set[int]]
"""Of the options and the rank of the first operand, which dims stay whole."""


@dataclass(frozen=True, slots=True)
class LaxCall:
    """How a primitive is called.

    function:  as a program writes it.
    whole:     see `Dims`.
    behind:    what it takes behind its operands, before its options, as written.
    together:  several operands are one tuple.
    otherwise: options that are left out where they have these values.
    rule:      what its rule says beside the text.
    """

    function: str
    whole: Dims
    rule: Rule
    behind: tuple[str, ...] = ()
    together: bool = False
    otherwise: Mapping[str, object] = field(default_factory=dict)

    def options(self, attrs: Mapping[str, object]) -> dict[str, object]:
        """Those that have to be said."""
        return {k: v for k, v in attrs.items() if k not in self.otherwise or v != self.otherwise[k]}


def _along(attrs: Mapping[str, object], rank: int) -> set[int]:
    (dim,) = (v for k, v in attrs.items() if k in ("axis", "dimension"))
    assert isinstance(dim, int)
    return {dim % rank}


def _windowed(attrs: Mapping[str, object], rank: int) -> set[int]:
    """Where the window is more than one place, or places are left out or added."""
    plain = {"padding": (0, 0)}
    each = {k: v for k, v in attrs.items() if isinstance(v, tuple)}
    return {d for d in range(rank) if any(v[d] != plain.get(k, 1) for k, v in each.items())}


def _matrix(attrs: Mapping[str, object], rank: int) -> set[int]:
    del attrs
    return {rank - 2, rank - 1}


def _nowhere(attrs: Mapping[str, object], rank: int) -> set[int]:
    del attrs, rank
    return set()


def _running(name: str, *saved: int, linear: bool = False) -> LaxCall:
    rule = Rule("", linear=linear, saves=(0,) * (not linear), saves_results=saved, cost="reduction")
    return LaxCall(f"lax.{name}", _along, rule, otherwise={"reverse": False})


def _window(start: str, joins: str, linear: bool = False) -> LaxCall:
    rule = Rule("", linear=linear, saves=(0,) * (not linear), cost="reduction")
    return LaxCall("lax.reduce_window", _windowed, rule, (start, joins))


LAX_CALLS: Mapping[str, LaxCall] = MappingProxyType(
    {
        "jax::cumsum": _running("cumsum", linear=True),
        "jax::cumprod": _running("cumprod", 0),
        "jax::cummax": _running("cummax", 0),
        "jax::cummin": _running("cummin", 0),
        "jax::cumlogsumexp": _running("cumlogsumexp", 0),
        "jax::argmin": LaxCall("jnp.argmin", _along, Rule("", cost="reduction")),
        "jax::sort": LaxCall(
            "lax.sort",
            _along,
            Rule("", saves=(0,), cost="reduction"),
            together=True,
            otherwise={"is_stable": True, "num_keys": 1},
        ),
        "jax::reduce_window_max": _window("-jnp.inf", "lax.max"),
        "jax::reduce_window_min": _window("jnp.inf", "lax.min"),
        "jax::reduce_window_sum": _window("0.0", "lax.add", linear=True),
        "jax::cholesky": LaxCall(
            "lax.linalg.cholesky", _matrix, Rule("", saves_results=(0,), flops=1.0)
        ),
        "jax::select_n": LaxCall("lax.select_n", _nowhere, Rule("", saves=(0,))),
    }
)


def lax_rule(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """The rule of such an op: the dims that its call names are whole, all others pass."""
    call, rank = LAX_CALLS[op.kind], len(operands[0].shape)
    whole = call.whole(op.attrs, rank)
    if len(results[0].shape) < rank:  # the dim is gone
        names = letters(rank)
        left = [f"{n}!" if d in whole else n for d, n in enumerate(names)]
        right = [n for d, n in enumerate(names) if d not in whole]
    else:
        left, right = one_to_one(operands[0].shape, results[0].shape, whole, "")
    written = text([left] * len(operands), [right] * len(results))
    return replace(call.rule, text=written)
