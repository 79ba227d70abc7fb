"""What to say of an op that no rule is known for, and which rule its shapes suggest."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.nouns.graph import Op, Tensor
from autopar.nouns.kinds import BODIES, LENGTH, LOOP, OWN_DERIVATIVE, PAIRS, SCAN
from autopar.rules.own_functions import FUNCTION

RANDOM = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm normal normal_functional "
    "bernoulli multinomial poisson uniform exponential rrelu rrelu_with_noise geometric cauchy "
    "log_normal random alpha_dropout feature_alpha_dropout".split()
)
"""Ops of PyTorch that draw random numbers, by name."""


def is_random(kind: str) -> bool:
    """Whether ops of a kind without a rule draw: ranks that run one whole draw each its own."""
    return kind.partition("::")[2] in RANDOM


def unwritable(op: Op) -> str:
    """Why the JAX backend cannot write a primitive again, in words; empty where it can, and for
    every other op. A primitive is called by its name on its operands, so it has one result and no
    options."""
    if "jax" not in op.attrs:
        return ""
    options = {k for k, v in op.attrs["jax"].items() if v not in ("False", "()")} - {"accuracy"}
    if options:
        return f"it has options ({', '.join(sorted(options))})"
    return f"it has {len(op.outputs)} results" if len(op.outputs) != 1 else ""


def no_rule(
    op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], example: str = ""
) -> str:
    """What to say of an op without a rule; ``example`` is a rule text that was found to hold."""

    def shown(tensors: Sequence[Tensor]) -> str:
        return ", ".join(f"{t.dtype}{list(t.shape)}" for t in tensors)

    place = f"It stands at {op.source} and maps {shown(operands) or 'nothing'} to {shown(results)}."
    if is_random(op.kind):
        return (
            f"no rule says how op {op.kind!r} may be split. {place} It draws random numbers in a "
            "way that is not known here: draw them by rand, randn, randint, bernoulli, uniform_, "
            "normal_, exponential_ or F.dropout without a generator, or give them as an entry of "
            "the batch."
        )
    if op.kind.startswith(OWN_DERIVATIVE):
        name = op.kind.removeprefix(OWN_DERIVATIVE)
        return (
            f"no dim of {name} can be split, a function with a derivative of its own, which is "
            f"kept as given. {place} Function and rule pair every entry with every other one, or "
            "have an op without a rule. Apply it to one sample by jax.vmap, leave reductions to "
            "the caller, or register a rule for what has none, as in\n"
            "    autopar.register_rule('jax::bessel_i1e', '... -> ...')"
        )
    if op.kind == SCAN:
        return (
            f"no dim of a scan of {op.attrs[LENGTH]} steps over time can be split. {place} Its "
            "step runs on the pieces of one rank, so a dim may be split that all of its results "
            "that are floats have, and whose entries no op of the step pairs. These pair some: "
            f"{op.attrs.get(PAIRS, 'none does')}. Apply the step to one sample by jax.vmap, give "
            "rows of each sample and take their mean behind the scan, or take time that passes "
            "linearly (state space models, linear attention) by jax.lax.associative_scan."
        )
    if BODIES in op.attrs:
        return (
            f"no dim of a {'loop' if op.kind == LOOP else 'branch'} can be split. {place} A body "
            "runs on the pieces of one rank, and these pair every entry with every other one, or "
            "have an op without a rule. Choose between both sides with jnp.where, give a loop a "
            "static length, or apply it to one sample by jax.vmap."
        )
    if unwritable(op):
        return (
            f"no rule says how op {op.kind!r} may be split. {place} Nor can autopar write it into "
            f"a program: {unwritable(op)}. Write it with jnp functions that autopar knows, or make "
            "it outside of the loss, as an entry of the batch."
        )
    if FUNCTION in op.attrs:
        place += (
            " It is a torch.autograd.Function: it runs by its own forward and backward, which the "
            "rule has to hold for."
        )
    if example:
        advice = f"Register one line, such as\n    autopar.register_rule({op.kind!r}, {example!r})"
        holds = (
            " The one above held when the op was run whole and in pieces on drawn numbers; whether "
            "it holds for all is yours to say."
        )
    else:
        advice = (
            "Register one line for it, in the notation of\n"
            "    autopar.register_rule('mylib::scale', 'b s d, d -> b s d')"
        )
        holds = ""
    return (
        f"no rule says how op {op.kind!r} may be split. {place} {advice}\n"
        "where equal names are the same index: name (may be split), name+ (summed over), "
        f"name! (kept whole).{holds}"
    )


def suggestion(operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> str:
    """A rule text that fits the shapes and splits the leading dim, most often the batch.

    Dims of one size share a name, aligned at the right, or at the left where that is what all
    leading dims agree on; every other index is kept whole. Empty where the results and the first
    operand do not have the leading dim in common, or another dim has its size: the op may pair the
    two, as `torch.diagonal` does.
    """
    for align_left in (False, True):
        text = _suggested(operands, results, align_left)
        if text:
            return text
    return ""


def _suggested(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], align_left: bool
) -> str:
    names: dict[int, list[tuple[int, str]]] = {}
    letters = iter("abcdefghijklmnopqrstuvwxyz")

    def name(shape: tuple[int, ...], i: int) -> str:
        place, size = i if align_left else len(shape) - i, shape[i]
        if size == 1:
            return "1"
        known = names.setdefault(place, [])
        for extent, letter in known:
            if extent == size:
                return letter
        known.append((size, next(letters, f"x{len(names)}_{place}")))
        return known[-1][1]

    terms = [[name(s, i) for i in range(len(s))] for s in (*results, *operands)]
    first = terms[0][0] if terms and terms[0] else "1"
    leading = terms[: len(results) + 1]
    if first == "1" or len(terms) == len(results) or not all(t[:1] == [first] for t in leading):
        return ""
    if not all(_leads(t, first) for t in terms):
        return ""
    if any(size == results[0][0] for shape in (*operands, *results) for size in shape[1:]):
        return ""

    def text(term: Sequence[str]) -> str:
        return " ".join(n if n in ("1", first) else f"{n}!" for n in term)

    left = ", ".join(map(text, terms[len(results) :]))
    return f"{left} -> {', '.join(map(text, terms[: len(results)]))}".strip()


def _leads(term: Sequence[str], name: str) -> bool:
    """Whether ``name`` leads the term, or the term has nothing to do with it."""
    return name not in term or (term[0] == name and term.count(name) == 1)
