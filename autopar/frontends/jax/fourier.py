"""Fourier transforms of pairs: one op, whose text makes complex numbers of them and pairs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from autopar.frontends.jax.draft import Builder, Node, Operand, Shape, Value
from autopar.frontends.jax.pair import Pair
from autopar.frontends.jax.shardy import rule_of
from autopar.rules.called import CALL, RULE

PRIMITIVE = "fft_of_pairs"

fft_of_pairs = jex.Primitive(PRIMITIVE)
fft_of_pairs.multiple_results = True


def transformed(x: Any, dtype: Any, fft_type: Any, fft_lengths: Sequence[int]) -> Any:
    """`lax.fft` of ``x``, real or a `Pair`: a pair, or a real array of ``dtype`` where the way back
    ends at one."""
    kind = fft_type.name
    pair = x if isinstance(x, Pair) else Pair(jnp.asarray(x, dtype))
    given = (pair.re,) if kind == "RFFT" else pair.both
    made = fft_of_pairs.bind(*given, kind=kind, lengths=tuple(map(int, fft_lengths)))
    return made[0] if kind == "IRFFT" else Pair(*made)


def text_of(kind: str, lengths: Sequence[int]) -> str:
    """``lax.fft(x.reshape(-1, 8), "RFFT", (8,)).reshape({made})`` of ``x``, its parts apart where
    it is complex.

    In rows, since XLA for CPUs fails where an all-gather of another dim reads a transform
    ("RET_CHECK failure fft_thunk.cc IsMonotonicWithDim0Major"): it wants the gathered dim outermost
    in memory, and gives the transform that layout.
    """
    x = "{0}" if kind == "RFFT" else "lax.complex({0}, {1})"
    last = (*lengths[:-1], lengths[-1] // 2 + 1) if kind == "IRFFT" else tuple(lengths)
    rows = ", ".join(map(str, (-1, *last)))
    call = f'lax.fft({x}.reshape({rows}), "{kind}", {tuple(lengths)}).reshape({{made}})'
    return call if kind == "IRFFT" else f"(lambda z: (jnp.real(z), jnp.imag(z)))({call})"


def _native(kind: str, lengths: Sequence[int], given: Sequence[Any]) -> list[Any]:
    """What the text computes."""
    made = lax.fft(given[0] if kind == "RFFT" else lax.complex(*given), kind, tuple(lengths))
    return [made] if kind == "IRFFT" else [jnp.real(made), jnp.imag(made)]


@fft_of_pairs.def_abstract_eval  # type: ignore[untyped-decorator]
def _shapes(*given: Any, kind: str, lengths: tuple[int, ...]) -> Any:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]
    made = jax.eval_shape(lambda *x: _native(kind, lengths, x), *shapes)
    return [jax.core.ShapedArray(a.shape, a.dtype) for a in made]


def converted(
    params: Mapping[str, Any], inputs: list[Operand], outs: Sequence[tuple[Shape, str]], b: Builder
) -> list[Operand]:
    """The op of one transform, with the compiler's rule for it."""
    kind, lengths = params["kind"], params["lengths"]
    operands = tuple(b.tensor(x) for x in inputs)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    rule = rule_of(lambda *x: _native(kind, lengths, x), shapes)
    attrs = {CALL: text_of(kind, lengths), **({RULE: rule} if rule else {})}
    values = tuple(Value(shape, dtype) for shape, dtype in outs)
    b.append(Node("jax::fft", operands, values, attrs, b.source))
    return list(values)
