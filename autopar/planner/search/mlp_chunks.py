"""In how many chunks of tokens feed-forward parts run.

Chunks save what stands between the products of a layer and make it again in backward, so they are
thought of where memory is short: where that is much and blocks run again to keep less, or nothing
fits. Then the question is asked once more with as many chunks as it takes, priced as one (the
products of a chunk are no thinner than `autopar.rules.feed_forward` allows), and what is fastest
gets the fewest that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.lowering.lowered import Lowered
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import DTYPE_BYTES, Graph
from autopar.nouns.layout import MLP_CHUNKS, LayoutError, Pins
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import NONE
from autopar.planner.ask.question import Answer, Outcome, Question
from autopar.planner.search.fewest import fewest_that_fit
from autopar.planner.search.layouts import Progress, search_plan
from autopar.planner.solve.solved import lowered_of
from autopar.planner.solve.standings import NothingFits
from autopar.planner.staged.in_full import priced_again
from autopar.rules.extents import extents
from autopar.rules.feed_forward import LEAST_TOKENS
from autopar.rules.feed_forwards import (
    AS_MANY_AS_IT_TAKES,
    KIND,
    NOTHING_BETWEEN,
    FeedForward,
    every_feed_forward,
)

Search = Callable[[Question, Progress], Outcome]
ANY = float("inf")
"""Seconds that every plan takes less than."""
WORTH, LITTLE = 0.1, 0.01
"""Of a device's memory, which what stands between the products of a layer must take of one sample
for chunks to be thought of; and where nothing fits."""
GAIN = 0.01
"""By which a plan with chunks must be faster than one without."""


@dataclass(frozen=True, slots=True)
class Answered:
    """``question``: with ``loss_chunks`` settled; ``mlp_chunks``: None, or how many."""

    question: Question
    loss_chunks: int | None
    mlp_chunks: int | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Asked:
    """How a model's questions are asked.

    answer:   the question with so many chunks of feed-forward parts (None: none of it), by a
              search, of plans that take less than so many seconds; raises what that does.
    graph_of: the graph of so many, and of so many chunks of the loss head.
    """

    answer: Callable[[int | None, Search, float], Answered]
    graph_of: Callable[[int | None, int | None], Graph]


def pinned_mlp_chunks(graph: Graph, chunks: int | None, framework: str, style: str) -> int | None:
    """Pinned ``chunks``, or None where that is 0 or nothing is.

    Raises `LayoutError` where they cannot be; says which op is against it.
    """
    if not chunks:
        return None
    text = f"--fix {MLP_CHUNKS}={chunks}"
    if framework != "torch":
        raise LayoutError(
            f"{text}: JAX programs run feed-forward parts at once so far; leave it out"
        )
    if style != "eager":
        raise LayoutError(
            f"{text}: compiled programs leave what stands between products to the compiler; leave "
            "it out, or say --style eager"
        )
    every = [each for _, each in every_feed_forward(graph)]
    if any(isinstance(each, FeedForward) for each in every):
        return chunks
    none = [each for each in every if not isinstance(each, FeedForward)]
    telling = sorted(none, key=lambda each: each.reason == NOTHING_BETWEEN)
    near = [f"; {each.down.source} is none, since {each.reason}" for each in telling]
    raise LayoutError(
        f"{text}: the model has no feed-forward part, products of one tensor with ops element by "
        f"element between them and one more product{''.join(near[:1])}; leave it out"
    )


def searched_mlp_chunks(
    asked: Asked,
    pins: Pins,
    framework: str,
    style: str,
    samples: int,
    cluster: Cluster,
    progress: Progress,
    search: Search,
) -> Answered:
    """The fastest layout that fits with chunks as pinned, or as is best.

    search: what answers where nothing fits anyhow, and says what would.
    """
    plain = asked.graph_of(None, None)
    pinned = pinned_mlp_chunks(plain, pins.mlp_chunks, framework, style)
    share = _share(plain, samples, cluster)
    # what is pinned of products and of what stands between them is to have an effect
    whole_pinned = pins.kernels or pins.precision or pins.tp_pieces
    if (
        pins.mlp_chunks is not None
        or whole_pinned
        or framework != "torch"
        or style != "eager"
        or (share <= LITTLE)
    ):
        return asked.answer(pinned, search, ANY)
    whole: Answered | None = None
    try:
        whole = asked.answer(None, search_plan, ANY)
    except NothingFits:
        progress("nothing fits; feed-forward parts in chunks of tokens are tried")
    if whole is not None and (share <= WORTH or not _runs_again(whole.outcome)):
        return whole
    worth_s = ANY if whole is None else whole.outcome.best.priced.time.total_s
    try:
        cut = _settled(asked, asked.answer(AS_MANY_AS_IT_TAKES, search_plan, worth_s))
    except (NothingFits, LayoutError):
        return whole if whole is not None else asked.answer(None, search, ANY)
    if whole is None:
        return cut
    bound_s = min(whole.outcome.lower_bound_s, cut.outcome.lower_bound_s)
    before_s, after_s = (e.outcome.best.priced.time.total_s for e in (whole, cut))
    best = cut if after_s < (1 - GAIN) * before_s else whole
    return replace(best, outcome=replace(best.outcome, lower_bound_s=bound_s))


def _share(graph: Graph, samples: int, cluster: Cluster) -> float:
    """Of the least memory of a device, what stands between the products of the largest part in one
    sample."""
    memory = min(kind.device.memory_bytes for kind in cluster.kinds)
    sizes = [
        (len(each.ups) + len(each.between)) * hidden.numel * DTYPE_BYTES[hidden.dtype]
        for part, each in every_feed_forward(graph)
        if isinstance(each, FeedForward)
        for hidden in (part.tensors[each.down.inputs[0]],)
    ]
    return max(sizes, default=0) / samples / memory


def _runs_again(outcome: Outcome) -> bool:
    """Whether what it settled on recomputes, or has state on the host."""
    decided = outcome.best.decided
    stages = decided.stages or (decided.layout,)
    return any(stage.recompute.policy != NONE or stage.offload != OFFLOAD[0] for stage in stages)


def _settled(asked: Asked, answered: Answered) -> Answered:
    """With the fewest chunks with which its best layout fits, at their price."""
    best, question = answered.outcome.best, answered.question

    def posed(chunks: int) -> Question:
        return replace(question, graph=asked.graph_of(chunks, answered.loss_chunks))

    def answer(chunks: int) -> Answer:
        return priced_again(posed(chunks), best)

    tokens = tokens_of(lowered_of(question, best.decided))
    few, made = fewest_that_fit(-(-tokens // LEAST_TOKENS), answer)
    outcome = replace(answered.outcome, best=made)
    return replace(answered, question=posed(few), mlp_chunks=few, outcome=outcome)


def check_tokens(lowered: Lowered, chunks: int) -> None:
    """Raises `LayoutError` where there are fewer tokens than chunks."""
    tokens = tokens_of(lowered)
    if chunks > tokens:
        raise LayoutError(
            f"--fix {MLP_CHUNKS}={chunks} is more than the {tokens} tokens of a sample that a rank "
            f"has; give at most {tokens}"
        )


def tokens_of(lowered: Lowered) -> int:
    """Along the dim that is cut, of the part with most, on a rank."""
    return max(
        extents(op.bound, op.strategy, part.mesh)["s"]
        for part in (lowered, *lowered.blocks.values())
        for op in part.ops
        if op.bound is not None and op.op.kind == KIND
    )
