"""Layouts of architectures by figures under published software, for the tests of their prices."""

from __future__ import annotations

from autopar.cost_models.software import Software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.planner.family.runs import TrainingRun, model_of
from autopar.pricing.software.figures import Figures
from autopar.pricing.software.trainer import Trainer, trainer_of
from autopar.pricing.summary import Summary
from autopar.pricing.units.held import StageBytes

NODE = load_cluster("examples/clusters/h100_8.yaml")


def trainer_of_run(
    arch: Arch, cluster: Cluster, layout: Layout, software: Software, precision: str = "bf16"
) -> Trainer:
    return trainer_of(cluster, layout, software, precision, arch.dim)


def trained(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    software: Software | None = None,
    precision: str = "bf16",
) -> Summary:
    """The whole model, as one stage."""
    run = TrainingRun(arch, cluster, layout, software or Software(), precision)
    return model_of(run, trainer_of_run(arch, cluster, layout, run.software, precision)).summary


def held(summary: Summary) -> StageBytes:
    assert summary.held is not None
    return summary.held


def figures_of(arch: Arch, layout: Layout, software: Software, layer: str = "Layer") -> Figures:
    """What a kind of layer does with the tokens of one context rank."""
    run = TrainingRun(arch, NODE, layout, software, "bf16")
    prices = model_of(run, trainer_of_run(arch, NODE, layout, software)).prices
    return prices.figures[layer, layout.cp]


def ends_of(arch: Arch, layout: Layout, software: Software) -> Figures:
    """The same of what lies outside the layers."""
    run = TrainingRun(arch, NODE, layout, software, "bf16")
    prices = model_of(run, trainer_of_run(arch, NODE, layout, software)).prices
    (root,) = (of for (_, ways), of in prices.figures.items() if of.head and ways == layout.cp)
    return root
