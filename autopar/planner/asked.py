"""How the questions about a captured graph are asked, and what is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

from autopar.frontends.shared.captured import Captured
from autopar.nouns.batch import sample_dims
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.layout import Pins
from autopar.nouns.style import style_of
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Lists
from autopar.planner.ask.checks import check_layers, check_ways
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.ask.sequences import cuts_along, every_cut, in_slices
from autopar.planner.options import Options
from autopar.planner.search.expert_placement import order_of
from autopar.planner.search.gathers import check_gather
from autopar.planner.search.kernels import asked_kernels
from autopar.planner.search.layouts import Progress, search_plan
from autopar.planner.search.loss_chunks import asked_chunks, searched_in_chunks
from autopar.planner.search.mlp_chunks import Answered, Asked, Search
from autopar.planner.search.recipes import asked_recipe
from autopar.planner.search.reductions import check_reduce
from autopar.planner.solve.standings import NothingFaster, NothingFits
from autopar.rules.batch import BatchFlow, flow_or_obstacle
from autopar.rules.cut import Cut, Cuts
from autopar.rules.feed_forwards import with_mlp_chunks
from autopar.rules.fusion import fusion
from autopar.rules.kernels import with_kernels
from autopar.rules.loss_heads import AS_MANY_AS_IT_TAKES, in_chunks
from autopar.rules.pieces import BatchMixed
from autopar.rules.uneven_routes import check_imbalance, with_imbalance


def asked(
    base: Graph,
    captured: Captured,
    workload: Workload,
    cluster: Cluster,
    options: Options,
    pins: Pins,
    actions: Lists | None,
    cut: tuple[BatchFlow, BatchMixed | None],
    progress: Progress,
) -> Asked:
    """How the questions about ``base``, the captured graph as it is to be computed, are asked.

    cut: how data ranks and microbatches may cut its batch, and what is against that.
    """
    batch_dims = sample_dims(captured.batch)
    flow, obstacle = cut
    style = options.style or style_of(workload.framework)
    check_layers(base, style)
    cuts_of = partial(_cuts, batch_dims=batch_dims, pins=pins, workload=workload, cluster=cluster)

    @cache
    def graph_of(mlp: int | None, loss: int | None) -> Graph:
        graph = with_mlp_chunks(base, mlp)
        return in_chunks(_by_kernels(graph, pins, workload, cluster, options), loss)

    def answer(mlp: int | None, search: Search, worth_s: float) -> Answered:
        loss = asked_chunks(
            graph_of(mlp, None), pins.loss_chunks, workload.framework, style, captured.samples,
            cluster,
        )  # fmt: skip
        if workload.framework == "jax" and loss == AS_MANY_AS_IT_TAKES:
            # The rule's passes are those of PyTorch: of XLA's only the memory was compared.
            try:
                return answered(mlp, None, search_plan, worth_s)
            except NothingFaster:
                raise
            except NothingFits:
                progress("nothing fits with whole logits; chunks of their rows are tried")
        return answered(mlp, loss, search, worth_s)

    def answered(mlp: int | None, loss: int | None, search: Search, worth_s: float) -> Answered:
        plain = graph_of(mlp, None)
        graph = in_chunks(plain, loss)
        check_ways(graph, pins, obstacle, captured.samples, workload.framework)
        question = Question(
            graph=graph,
            cuts=cuts_of(graph),
            batch=captured.samples,
            obstacles=flow.obstacles,
            cluster=cluster,
            precision=workload.precision,
            optimizer=workload.optimizer,
            pins=pins,
            actions=actions,
            searcher=options.searcher,
            uneven=workload.framework != "jax",
            splits_batch=obstacle is None,
            fusion=fusion(graph, style),
            verbose=options.verbose,
            framework=workload.framework,
            clips=workload.clip_norm is not None,
            worth_s=worth_s,
        )
        check_reduce(question)
        check_gather(question)
        question, loss, outcome = _searched(question, plain, cuts_of, loss, progress, search)
        return Answered(question, loss, mlp, outcome)

    return Asked(answer, graph_of)


def _by_kernels(
    graph: Graph, pins: Pins, workload: Workload, cluster: Cluster, options: Options
) -> Graph:
    """The graph with how uneven routes are, and what its ops may or are to run by."""
    if options.imbalance is not None:
        check_imbalance(graph, options.imbalance)
        devices = cluster.device_count
        graph = with_imbalance(graph, options.imbalance, order_of(pins), devices)
    framework = workload.framework
    style = options.style or style_of(framework)
    graph = asked_recipe(graph, pins.precision, framework, style, workload.precision, cluster)
    return with_kernels(graph, asked_kernels(graph, pins, framework, style, cluster))


def _searched(
    question: Question,
    plain: Graph,
    cuts_of: Callable[[Graph], Cuts],
    chunks: int | None,
    progress: Progress,
    search: Search,
) -> tuple[Question, int | None, Outcome]:
    """What is answered, in how many chunks of the loss head, and the answer; ``plain``: the graph
    with logits."""

    @cache
    def whole() -> Question:
        return replace(question, graph=plain, cuts=cuts_of(plain))

    answered = question
    if chunks == AS_MANY_AS_IT_TAKES:
        chunks, outcome = searched_in_chunks(question, plain, whole, progress, search)
        if chunks is None:
            answered = whole()
        else:
            answered = replace(question, graph=in_chunks(plain, chunks))
    else:
        outcome = search(question, progress)
    return replace(answered, cluster=outcome.cluster), chunks, outcome


def _cuts(
    graph: Graph, batch_dims: Mapping[str, int], pins: Pins, workload: Workload, cluster: Cluster
) -> Cuts:
    """How axes of the batch may cut the graph."""
    flow, obstacle = flow_or_obstacle(graph, batch_dims)
    if (pins.cp or 1) > 1:
        return cuts_along(graph, batch_dims, pins.cp or 1)
    cuts = Cuts(Cut(batch_dims, flow.choices))
    if (pins.seq_slices or 1) > 1:
        return in_slices(graph, cuts.samples, pins.seq_slices or 1)
    # what a JAX loss returns beside the loss may be of tokens, which ranks along cp cannot give
    beside = workload.framework == "jax" and len(graph.outputs) > 1
    if pins.cp is None and obstacle is None and not beside:
        return every_cut(graph, cuts.samples, cluster.device_count)
    return cuts
