"""Pins that a framework, a style, a cluster or a model cannot have, refused by name."""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.axes import REPLICATE, SHARD
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.layout import LayoutError, Pins
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import policies
from autopar.nouns.style import Style, style_of
from autopar.nouns.workload import Workload
from autopar.planner.ask.experts import check_experts, check_matrices
from autopar.planner.ask.sequences import check_heads
from autopar.pricing.offload import obstacle as offload_obstacle
from autopar.rules.pieces import BatchMixed


def check_style(framework: str, asked: Style | None) -> None:
    """Raises `UserError` for a style that the framework does not have."""
    if framework == "jax" and asked not in (None, style_of("jax")):
        raise UserError(
            f"--style {asked}: JAX always compiles; leave --style out, or say --style compiled"
        )


def check_layers(graph: Graph, style: Style) -> None:
    """Raises `UserError` where layers are to be compiled and the model has none that repeat."""
    if style == "layers" and not graph.blocks:
        raise UserError(
            "--style layers: no layers of the model repeat, so there is nothing that is compiled "
            "once for all of them; say --style compiled or eager"
        )


def check_pins(pins: Pins, workload: Workload, cluster: Cluster) -> None:
    """Raises `UserError` for pins that programs of the framework cannot have."""
    check_offload(pins, workload, cluster)
    check_recompute(pins, workload)


def check_recompute(pins: Pins, workload: Workload) -> None:
    """Raises `LayoutError` where programs of the framework have no such recomputation."""
    known = policies(workload.framework)
    if pins.recompute is not None and str(pins.recompute) not in known:
        raise LayoutError(
            f"--fix recompute={pins.recompute}: JAX programs keep what products, convolutions "
            "and attention gave under recompute=none already, and make the rest again; take "
            f"{' or '.join(known)}"
        )


def check_offload(pins: Pins, workload: Workload, cluster: Cluster) -> None:
    """Raises `LayoutError` where what is pinned to be offloaded cannot be."""
    if pins.offload not in (None, OFFLOAD[0]):
        against = offload_obstacle(cluster, workload.optimizer, workload.framework)
        if against:
            raise LayoutError(f"--fix offload={pins.offload}: {against}; leave offload out")


def check_ways(
    graph: Graph, pins: Pins, obstacle: BatchMixed | None, samples: int, framework: str
) -> None:
    """Raises `LayoutError` where a batch of so many samples, its experts or heads cannot be split
    as pinned; ``obstacle``: what stands against any split of the batch."""
    if obstacle is not None:
        _check_one_rank(pins, obstacle, samples)
    if (pins.ep or 1) > 1:
        check_experts(graph, pins.ep or 1, framework)
    if (pins.etp or 1) > 1:
        check_matrices(graph, pins.etp or 1)
    check_heads(graph, pins.cp_head or 1)


def unsharded(pins: Pins, mixed: str) -> Pins:
    """``fixed`` without ZeRO. Raises `LayoutError` where that is pinned."""
    if (pins.zero or 0) > 0 or (pins.dp_shard or 1) > 1:
        raise LayoutError(f"--fix {pins}: {mixed}; declare them alike", {"zero": "0"})
    return replace(pins, zero=0)


def _check_one_rank(pins: Pins, obstacle: BatchMixed, samples: int) -> None:
    """Raises ``obstacle`` where pins ask for more than one data rank with the whole batch."""
    split = (pins.dp_replicate or 1) * (pins.dp_shard or 1) > 1 or (pins.zero or 0) > 0
    if split or pins.microbatch not in (None, samples):
        raise BatchMixed(str(obstacle), {REPLICATE: "1", SHARD: "1"})
