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
from autopar.pricing.units.held import StageBytes

NODE = load_cluster("examples/clusters/h100_8.yaml")


def trainer_of_run(
    arch: Arch, cluster: Cluster, layout: Layout, software: Software, precision: str = "bf16"
) -> Trainer:
    return trainer_of(cluster, layout, software, precision, arch.dim)


def held(
    arch: Arch, cluster: Cluster, layout: Layout, software: Software, precision: str = "bf16"
) -> StageBytes:
    """What is held of the whole model, as one stage."""
    run = TrainingRun(arch, cluster, layout, software, precision)
    trainer = trainer_of_run(arch, cluster, layout, software, precision)
    model = model_of(run, trainer)
    return model.stage_held(0, len(model.units))


def figures_of(arch: Arch, layout: Layout, software: Software, layer: str = "Layer") -> Figures:
    """What a kind of layer does with the tokens of one context rank."""
    run = TrainingRun(arch, NODE, layout, software, "bf16")
    model = model_of(run, trainer_of_run(arch, NODE, layout, software))
    assert model.summary.bodies[layer]
    return model.prices.figures[layer]


def ends_of(arch: Arch, layout: Layout, software: Software) -> Figures:
    """The same of what lies outside the layers."""
    run = TrainingRun(arch, NODE, layout, software, "bf16")
    model = model_of(run, trainer_of_run(arch, NODE, layout, software))
    assert model.summary.root
    (root,) = (of for of in model.prices.figures.values() if of.head)
    return root
