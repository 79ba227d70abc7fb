"""In how many chunks of rows a model's last product and its loss run.

A chunk more costs the passes over the head's matrix that it makes, and saves memory; so the search
takes as many as it takes for granted, at the time of one, which no number of chunks is below
(`autopar.rules.vocabulary`). What it has settled on gets the fewest that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.lowering.lowered import Lowered
from autopar.nouns.axes import EXPERT, SEQUENCES, TENSOR
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import DTYPE_BYTES, Graph
from autopar.nouns.layout import CHUNKS, LayoutError
from autopar.planner.ask.question import Answer, Outcome, Question
from autopar.planner.search.fewest import fewest_that_fit
from autopar.planner.search.layouts import Progress, search_plan
from autopar.planner.solve.solved import lowered_of
from autopar.planner.solve.standings import NothingFaster, NothingFits
from autopar.planner.staged.in_full import priced_again
from autopar.rules.extents import extents
from autopar.rules.loss_heads import AS_MANY_AS_IT_TAKES, KIND, LossHead, in_chunks, loss_heads
from autopar.rules.terms import accumulated
from autopar.rules.vocabulary import FEWEST_ROWS, LEAST_ROWS

Search = Callable[[Question, Progress], Outcome]
WORTH = 0.02
"""Of a device's memory, which the logits of one sample must take for chunks to be thought of."""


def asked_chunks(
    graph: Graph, chunks: int | None, framework: str, style: str, samples: int, cluster: Cluster
) -> int | None:
    """What the search is to take: pinned ``chunks`` (0: none), else as many as it takes where the
    logits of a sample are worth it; None: logits are whole.

    Raises `LayoutError` where pinned chunks cannot be; says which op is against it.
    """
    if chunks is not None:
        return _pinned(graph, chunks, framework, style) if chunks else None
    if framework == "torch" and style == "compiled":
        return None
    sizes = [_logits_bytes(graph, h) for h in loss_heads(graph) if isinstance(h, LossHead)]
    memory = min(kind.device.memory_bytes for kind in cluster.kinds)
    return AS_MANY_AS_IT_TAKES if max(sizes, default=0) > WORTH * memory * samples else None


def _pinned(graph: Graph, chunks: int, framework: str, style: str) -> int:
    text = f"--fix {CHUNKS}={chunks}"
    if framework == "torch" and style == "compiled":
        raise LayoutError(
            f"{text}: compiled programs leave the loss to the compiler; leave it out, or say "
            "--style layers or eager"
        )
    heads = loss_heads(graph)
    if not heads:
        raise LayoutError(f"{text}: the model has no cross-entropy of logits; leave it out")
    for head in heads:
        if not isinstance(head, LossHead):
            raise LayoutError(
                f"{text}: the loss at {head.loss.source} is not taken in chunks, since "
                f"{head.reason}; change that, or leave {CHUNKS} out"
            )
        if chunks > head.rows:
            raise LayoutError(
                f"{text} is more than the {head.rows} rows of the logits at "
                f"{head.linear.source}; give at most as many"
            )
    return chunks


def _logits_bytes(graph: Graph, head: LossHead) -> int:
    """Of the whole batch: in the dtype of the compute, their log-probabilities and gradient."""
    logits = graph.tensors[head.linear.name]
    each = DTYPE_BYTES[logits.dtype] + 2 * DTYPE_BYTES[accumulated(logits)]
    return logits.numel * each


def searched_in_chunks(
    question: Question,
    plain: Graph,
    whole: Callable[[], Question],
    progress: Progress,
    search: Search,
) -> tuple[int | None, Outcome]:
    """The fastest layout that fits with as many chunks as that takes, and how many these are; None:
    whole logits are faster.

    question: of a graph whose chunks are open; ``plain``: that with logits, ``whole``: the question
    of it; ``search``: what answers where nothing fits but with few rows at a time, and raises where
    nothing does.
    """
    try:
        outcome = search_plan(question, progress)
        chunks, outcome = _settled(question, outcome, plain, LEAST_ROWS)
    except NothingFaster:
        raise
    except NothingFits:
        progress(f"nothing fits with {LEAST_ROWS} rows of logits at a time; fewer are tried")
    else:
        other = _with_logits(whole, outcome, progress) if chunks == 1 else None
        return (chunks, outcome) if other is None else (None, other)
    finer = replace(question, graph=in_chunks(plain, AS_MANY_AS_IT_TAKES, FEWEST_ROWS))
    return _settled(finer, search(finer, progress), plain, FEWEST_ROWS)


def _with_logits(
    whole: Callable[[], Question], outcome: Outcome, progress: Progress
) -> Outcome | None:
    """The fastest pipeline of as many ranks, each as many ways split, that makes logits whole; None
    where that is not faster. A head whose gradients are made with it makes one rank's forward long
    and leaves it nothing to do later, which schedules live on."""
    best = outcome.best
    if not best.decided.stages:
        return None
    model, plain = best.decided.candidate.model, whole()
    worth_s = best.priced.time.total_s
    cp, ep = model.ways(SEQUENCES), model.size(EXPERT)
    pins = replace(plain.pins, pp=best.decided.pp, tp=model.size(TENSOR), cp=cp, ep=ep)
    asked = replace(plain, cluster=outcome.cluster, pins=pins, worth_s=worth_s)
    try:
        other = search_plan(asked, progress)
    except (NothingFits, LayoutError):
        return None
    if other.best.priced.time.total_s >= worth_s:
        return None
    bound_s = min(outcome.lower_bound_s, other.lower_bound_s)
    return replace(outcome, best=other.best, lower_bound_s=bound_s)


def _settled(question: Question, outcome: Outcome, plain: Graph, least: int) -> tuple[int, Outcome]:
    """The fewest chunks with which the outcome's best layout fits, and the outcome at their
    price."""
    question = replace(question, cluster=outcome.cluster)

    def answer(chunks: int) -> Answer:
        again = replace(question, graph=in_chunks(plain, chunks))
        return priced_again(again, outcome.best)

    rows = rows_of(lowered_of(question, outcome.best.decided))
    few, best = fewest_that_fit(-(-rows // least), answer)
    return few, replace(outcome, best=best)


def check_rows(lowered: Lowered, chunks: int) -> None:
    """Raises `LayoutError` where chunks of the plan's rows would be empty."""
    rows = rows_of(lowered)
    if chunks > rows:
        raise LayoutError(
            f"--fix {CHUNKS}={chunks} is more than the {rows} rows of logits that a rank has of a "
            f"microbatch; give at most {rows}, or fewer microbatches"
        )


def rows_of(lowered: Lowered) -> int:
    """Of the loss head with most, on a rank in one microbatch."""
    heads = [op for op in lowered.ops if op.op.kind == KIND]
    bounds = [(op.bound, op.strategy) for op in heads]
    return max(extents(b, s, lowered.mesh)["t"] for b, s in bounds if b is not None)
