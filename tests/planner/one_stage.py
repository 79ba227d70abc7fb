"""The price of a summary that is all of a model, as one stage."""

from __future__ import annotations

from typing import cast

from autopar.lowering.lowered import Lowered
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import Recompute
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.pipeline import PipelinePrices
from autopar.pricing.priced import alone, priced
from autopar.pricing.prices import Prices
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import StepTime
from autopar.pricing.summary import Summary


def one_stage(
    summary: Summary, state: StateSharding, cluster: Cluster, recompute: Recompute
) -> StepTime:
    """Of one unit, so nothing that is lowered is asked for."""
    prices = Prices(cluster, Mesh((), ()), state.precision)
    model = CutModel(Cuts(cast(Lowered, None), ("",), (0,)), summary, prices, "torch")
    stages = PipelinePrices(model, cluster, state, recompute, 1)
    return priced(stages, alone(state.microbatches), (1,)).time
