"""Elementwise ops: every dim is parallel; what they save is what their derivative reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.kept import Kept
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import letters, others_need, text

# Operations per element of functions that expand to a polynomial or an exponential. Nominal: such
# ops are bound by memory on every device of the catalogue.
TRANSCENDENTAL = 4.0

_ONE = "...~ -> ...~"


def _one(saves: str = "", linear: bool = False, flops: float = 1.0, view: bool = False) -> Rule:
    """One operand; ``saves`` is "x", "y" (the result) or both."""
    return Rule(
        _ONE,
        linear=linear,
        saves=(0,) if "x" in saves else (),
        saves_results=(0,) if "y" in saves else (),
        flops=flops,
        view=view,
    )


def _text(count: int) -> str:
    return f"{', '.join(['...~'] * count)} -> ...~"


def _sum(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """a + b: linear in both together, but a scalar added to a partial sum would be added often."""
    del results
    both = len(operands) == 2
    return Rule(_text(len(operands)), linear=both or op.attrs.get("other", 0) == 0)


def _mul(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """a * b is linear in a where b is one constant number, or else in either alone."""
    del op, results
    saves = tuple(i for i in range(len(operands)) if others_need(operands, i))
    numbers = [i for i, t in enumerate(operands) if t.numel == 1 and not t.differentiable]
    scaled = [i for i in range(len(operands)) if i not in numbers]
    return Rule(
        _text(len(operands)),
        linear=len(scaled) == 1,
        partials=tuple(scaled),
        alone=tuple(scaled) if len(scaled) == 2 else (),
        saves=saves,
        backward=2.0,
    )


def _div(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """a / b is linear in a: a partial numerator passes over a whole denominator."""
    del results
    if len(operands) == 1:
        if op.attrs.get("scalar_first"):  # keeps the reciprocal
            kept = Kept(("...",), DTYPE_BYTES[operands[0].dtype])
            return Rule(_text(1), keeps=(kept,), backward=3.0)
        return Rule(_text(1), linear=True)
    saves = (0, 1) if operands[1].differentiable else (1,)
    return Rule(_text(2), linear=True, partials=(0,), saves=saves, backward=2.0)


def _pow(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    # The derivative in the exponent is the result times a logarithm; PyTorch keeps the result for
    # every tensor exponent, whether it has a gradient or not.
    keeps_result = len(operands) == 2 or bool(op.attrs.get("scalar_first"))
    return Rule(
        _text(len(operands)),
        saves=tuple(range(len(operands))),
        saves_results=(0,) if keeps_result else (),
        flops=TRANSCENDENTAL,
        backward=2.0,
    )


def _larger(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del op, results
    return Rule(_text(len(operands)), saves=tuple(range(len(operands))))


def _remainder(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    divided_by = len(operands) == 2 or bool(op.attrs.get("scalar_first"))
    needed = divided_by and operands[-1].differentiable
    return Rule(_text(len(operands)), saves=tuple(range(len(operands))) if needed else ())


def _flat(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """No gradient at all: comparisons, logic, rounding."""
    del op, results
    return Rule(_text(len(operands)))


def _where(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    scalars = [op.attrs[name] for name in ("a", "b") if op.attrs.get(name) is not None]
    return Rule(
        _text(len(operands)),
        linear=len(operands) > 1 and all(s == 0 for s in scalars),
        partials=tuple(range(1, len(operands))),
        saves=(0,),
    )


def _masked_fill(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    plain = len(operands) == 2 and op.attrs.get("value", 0) == 0
    return Rule(_text(len(operands)), linear=plain, partials=(0,), saves=(1,))


def _dropout(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Keeps its mask, one byte an element. Not linear: ranks would have to draw one mask."""
    del results
    if op.attrs.get("p", 0) == 0:
        return replace(_one(linear=True), view=True)
    itemsize = DTYPE_BYTES[operands[0].dtype]
    if op.attrs.get("features"):  # the mask is [b, c] and of the dtype of x
        names = letters(len(operands[0].shape))
        return Rule(
            text([names], [names]), keeps=(Kept((names[0], names[1]), itemsize),), flops=2.0
        )
    kept = Kept(("...",), itemsize if op.attrs.get("alpha") else 1)
    return Rule(_ONE, keeps=(kept,), flops=2.0)


JAX_FUNCTIONS = tuple(
    f"jax::{name}"
    for name in (
        "acos acosh asin asinh atan atanh cbrt cosh digamma erf_inv erfc expm1 lgamma log1p sinh "
        "tan"
    ).split()
)
"""Primitives of one operand and no options, which programs call by their names."""

ELEMENTWISE: Mapping[str, Rule | RuleMaker] = {
    "add": _sum,
    "sub": _sum,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "maximum": _larger,
    "minimum": _larger,
    "remainder": _remainder,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"), _flat),
    "floor_divide": _flat,
    "jax::rem": _remainder,
    "jax::div": _flat,  # of integers, towards zero
    # one operand
    "neg": _one(linear=True),
    "identity": _one(linear=True, view=True),
    "detach": _one(linear=True, view=True),
    "cast": _one(linear=True),
    **dict.fromkeys(("exp", "sigmoid", "tanh"), _one("y", flops=TRANSCENDENTAL)),
    **dict.fromkeys(("sqrt", "rsqrt", "relu", "reciprocal"), _one("y")),
    **dict.fromkeys(("log", "sin", "cos", "erf"), _one("x", flops=TRANSCENDENTAL)),
    **dict.fromkeys(("abs", "square", "clamp", "hardtanh", "leaky_relu"), _one("x")),
    **dict.fromkeys(("gelu", "silu", "softplus", "elu", "mish"), _one("x", flops=TRANSCENDENTAL)),
    **dict.fromkeys(("not", "isinf", "isnan", "sign", "floor", "jax::is_finite"), _one()),
    **dict.fromkeys(JAX_FUNCTIONS, _one("x", flops=TRANSCENDENTAL)),
    **dict.fromkeys(("jax::expm1", "jax::tan"), _one("y", flops=TRANSCENDENTAL)),
    "jax::atan2": Rule(_text(2), saves=(0, 1), flops=TRANSCENDENTAL, backward=2.0),
    **dict.fromkeys(
        ("jax::igamma", "jax::igammac"),
        Rule(_text(2), saves=(0, 1), flops=TRANSCENDENTAL, backward=2.0),
    ),
    "jax::clamp": Rule(_text(3), saves=(0, 1, 2)),
    "jax::ceil": _one(),
    "jax::rint": _one(),
    "gated_activation": Rule(_text(2), saves=(0, 1), flops=TRANSCENDENTAL + 1, backward=2.0),
    "where": _where,
    "masked_fill": _masked_fill,
    "dropout": _dropout,
}
