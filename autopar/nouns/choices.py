"""What programs do on top of a plan's layout: a row for each choice.

Whoever prints, compares, exports or checks plans goes by this table; a new choice is a field of
`autopar.nouns.plan.Plan` and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.nouns.axes import AXES
from autopar.nouns.buckets import MIB, bucket_text
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.grammar import WORDS
from autopar.nouns.kernels import kernel_of, kernels_text
from autopar.nouns.layout import GATHER, IN_8_BITS, REDUCE
from autopar.nouns.pieces import pieces_text, routed_text
from autopar.nouns.plan import Plan
from autopar.nouns.prefetch import PREFETCHES
from autopar.nouns.recipes import GATHERED, Narrow, recipes_text
from autopar.nouns.reduction import LIBRARY, ranks_inside, two_level_of
from autopar.nouns.scatters import scatters_text

_LONGEST = 40
"""Of a placement's text that is shown whole."""
Wrong = tuple[str, Any, str]
"""Where in ``plan.json``, what stands there, and what may."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One that a plan may have made, as functions of what it has.

    field:  of `Plan`; None, or nothing in it, where it is as ever.
    label:  in summaries and comparisons; ``usual``: in comparisons where it is as ever.
    text:   in comparisons. words: in a summary.
    aside:  what whoever exports the plan is to know.
    wrong:  what of it no plan can have.
    """

    field: str
    label: str
    usual: str
    text: Callable[[Any], str]
    words: Callable[[Any], str]
    aside: Callable[[Any], str]
    wrong: Callable[[Any], Iterator[Wrong]]

    def of(self, plan: Plan) -> Any:
        """What the plan has, None where it is as ever."""
        value = getattr(plan, self.field)
        return None if value is None or value == {} else value


def made(plan: Plan) -> Iterator[tuple[Choice, Any]]:
    """What a plan chose otherwise than as ever."""
    for choice in CHOICES:
        if (value := choice.of(plan)) is not None:
            yield choice, value


def asides(plan: Plan) -> Iterator[str]:
    """What the plan's programs do that no layout holds, as notes for other trainers."""
    return (choice.aside(value) for choice, value in made(plan))


def _loss_words(chunks: int) -> str:
    if chunks == 1:
        return "with its product, at once: gradients are made beside it, logits are not kept"
    return f"with its product, in {chunks} chunks of rows: 1/{chunks} of the logits at a time"


def _wrong_loss(chunks: int) -> Iterator[Wrong]:
    if chunks < 1:
        yield "loss_chunks", chunks, "a whole number from 1, or null"


def _mlp_words(chunks: int) -> str:
    if chunks == 1:
        return "at once, what stands between their products made again in backward"
    return f"in {chunks} chunks of tokens: 1/{chunks} of what stands between products at a time"


def _wrong_mlp(chunks: int) -> Iterator[Wrong]:
    if chunks < 1:
        yield "mlp_chunks", chunks, "a whole number from 1, or null"


def _wrong_bucket(size_bytes: int) -> Iterator[Wrong]:
    if size_bytes < MIB or size_bytes % MIB:
        yield "bucket_bytes", size_bytes, "a multiple of 1048576, or null"


def _pieces_aside(pieces: dict[str, int]) -> str:
    return (
        f"tp_pieces={max(pieces.values())} of {len(pieces)} collectives beside their products: the "
        "trainer overlaps as it does by itself"
    )


def _routed_words(pieces: dict[str, int]) -> str:
    return f"tokens travel in pieces: {routed_text(pieces)}"


def _routed_aside(pieces: dict[str, int]) -> str:
    return (
        f"expert_pieces={max(pieces.values())} of {len(pieces)} layers of experts: the trainer "
        "sends tokens in its own way"
    )


def _shared_text(beside: Mapping[str, str]) -> str:
    """``mlp.shared_experts of Block::mlp/experts, and of 1 more layer``"""
    (name, path), *others = beside.items()
    more = f", and of {len(others)} more layer{'s' if len(others) > 1 else ''}" if others else ""
    return f"{path} of {name}{more}"


def _placed_text(placement: Mapping[str, ExpertPlacement]) -> str:
    """``0 3 | 1 2 of layers.1.mlp, and 3 more layers``"""
    (name, first), *others = placement.items()
    shown = str(first) if len(str(first)) <= _LONGEST else f"{len(first.experts)} experts"
    more = f", and {len(others)} more layer{'s' if len(others) > 1 else ''}" if others else ""
    return f"{shown} of {name}{more}"


def _wrong_slices(slices: int) -> Iterator[Wrong]:
    if slices < 2:
        yield "seq_slices", slices, "a whole number from 2, or null"


def _wrong_reduce(dtype: str) -> Iterator[Wrong]:
    if dtype not in WORDS[REDUCE]:
        yield "reduce_dtype", dtype, " or ".join(WORDS[REDUCE]) + ", or null"


def _wrong_gather(dtype: str) -> Iterator[Wrong]:
    if dtype != GATHERED:
        yield "gather_dtype", dtype, f"{GATHERED}, or null"


def _wrong_scatters(scatters: dict[str, int]) -> Iterator[Wrong]:
    for axis, first in scatters.items():
        if first < 2 or not set(axis.split("+")) <= set(AXES):
            yield f"scatters[{axis!r}]", first, "an axis, and 2 of its ranks or more"


def _wrong_all_reduce(text: str) -> Iterator[Wrong]:
    if ranks_inside(text) is None:
        yield "all_reduce", text, f"{two_level_of(2)} or more, or null"


def _wrong_prefetch(units: int) -> Iterator[Wrong]:
    if units not in PREFETCHES:
        yield "prefetch", units, " or ".join(map(str, PREFETCHES))


def _wrong_kernels(kernels: dict[str, str]) -> Iterator[Wrong]:
    for where, text in kernels.items():
        if not all(kernel_of(text)):
            yield f"kernels.{where}", text, "such as 'attention by cudnn'"


def _wrong_recipes(recipes: dict[str, str]) -> Iterator[Wrong]:
    for name, text in recipes.items():
        try:
            Narrow.parse(text)
        except ValueError as error:
            yield f"recipes[{name!r}]", text, f"a recipe: {error}"


def _none(value: Any) -> Iterator[Wrong]:
    """Checked with what it lies in."""
    yield from ()


CHOICES = (
    Choice(
        "loss_chunks", "loss", "of whole logits",
        lambda n: f"in {n} chunks", _loss_words,
        lambda n: f"loss_chunks={n} (logits are never whole): a device's memory may be short "
        "without",
        _wrong_loss,
    ),
    Choice(
        "mlp_chunks", "feed-forward", "at once",
        lambda n: f"in {n} chunks" if n > 1 else "made again", _mlp_words,
        lambda n: f"mlp_chunks={n} (what stands between products of an MLP is never whole, and is "
        "made again in backward): a device's memory may be short without",
        _wrong_mlp,
    ),
    Choice(
        "bucket_bytes", "gradients", "in usual buckets",
        lambda b: f"in buckets of {bucket_text(b)}",
        lambda b: f"added up {bucket_text(b)} at a time",
        lambda b: f"bucket={bucket_text(b)} of gradients: the trainer has its own size",
        _wrong_bucket,
    ),
    Choice(
        "tp_pieces", "tensor parallel", "in one piece", pieces_text, pieces_text, _pieces_aside,
        _none,
    ),
    Choice(
        "expert_pieces", "experts", "tokens at once", routed_text, _routed_words, _routed_aside,
        _none,
    ),
    Choice(
        "shared_experts", "shared experts", "behind the others",
        lambda b: f"while tokens travel: {_shared_text(b)}",
        lambda b: f"computed while tokens travel to the others: {_shared_text(b)}",
        lambda b: f"shared_experts=beside of {len(b)} layers: the trainer computes them in its own "
        "order",
        _none,
    ),
    Choice(
        "expert_placement", "experts on ranks", "in order", _placed_text,
        lambda p: f"by load: {_placed_text(p)}",
        lambda p: f"expert_placement=load of {len(p)} layers: the trainer has experts in order",
        _none,
    ),
    Choice(
        "seq_slices", "sequences", "whole",
        lambda n: f"in {n} slices", lambda n: f"pass the stages in {n} slices, one after the other",
        lambda n: f"seq_slices={n}: the trainer passes whole sequences from stage to stage",
        _wrong_slices,
    ),
    Choice(
        "reduce_dtype", "reduction", "as stored", str, lambda d: f"of gradients in {d}",
        lambda d: f"reduce={d} of gradients: the trainer has its own dtype", _wrong_reduce,
    ),
    Choice(
        "scatters", "reduce-scatters", "in one", scatters_text,
        lambda s: f"in two, one after the other, {scatters_text(s)}",
        lambda s: f"reduce-scatters in two ({scatters_text(s)}): the trainer has one",
        _wrong_scatters,
    ),
    Choice(
        "all_reduce", "all-reduce", LIBRARY, str,
        lambda t: f"of gradients inside domains of {ranks_inside(t)} ranks, then across",
        lambda t: f"all_reduce={t}: the library's own takes its place", _wrong_all_reduce,
    ),
    Choice(
        "prefetch", "prefetch", "usual", str,
        lambda n: f"parameters of {n} units gathered ahead",
        lambda n: f"prefetch={n}: the trainer gathers ahead in its own way", _wrong_prefetch,
    ),
    Choice(
        "kernels", "kernels", "as torch has them", kernels_text, kernels_text,
        lambda k: f"kernels ({kernels_text(k)}): the trainer has its own", _wrong_kernels,
    ),
    Choice(
        "recipes", "8-bit layers", "none", recipes_text, recipes_text,
        lambda r: f"precision={recipes_text(r)} in 8 bits: the trainer computes in the plan's "
        "precision",
        _wrong_recipes,
    ),
    Choice(
        "gather_dtype", "gathers", "as computed with", str,
        lambda d: f"of the weights of 8-bit layers in {d}",
        lambda _: f"{GATHER}={IN_8_BITS}: whether the trainer does is a switch of its own",
        _wrong_gather,
    ),
)  # fmt: skip
