"""A captured transformer and its architecture's figures are priced alike.

The two models of time share their constants and see the same products, collectives and overlap by
different ways: op by op on the graph, and layer by layer on the transformer family. What published
runs say of the second therefore says something of the first.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from autopar.cost_models.layout import layout_from_fix, parse_fix
from autopar.cost_models.software import default_software
from autopar.files.cluster_file import cluster_from_text
from autopar.frontends.captured import Captured
from autopar.frontends.dispatch import capture
from autopar.planner.architecture import arch_of
from autopar.planner.estimate import estimate
from autopar.planner.planning import Options, plan_captured
from benchmarks.llama3 import llama_8b

CLUSTER = cluster_from_text(
    """
name: 8 H100
groups: [{device: H100, count: 8}]
levels:
  - {name: nvlink, span: 8, bandwidth: 450 GB/s, latency: 2 us, in_network_reduction: true}
"""
)
APART = 0.10


@lru_cache(maxsize=1)
def captured() -> Captured:
    return capture(llama_8b)


@pytest.mark.parametrize(
    "fix",
    [
        "dp_shard=8,zero=3,microbatch=1,recompute=full",
        "dp_shard=4,tp=2,zero=1,microbatch=1,recompute=full",
    ],
)
def test_step_times_agree(fix: str) -> None:
    pins = dict(part.split("=") for part in fix.split(","))
    options = Options(style="compiled")
    planned = plan_captured(captured(), llama_8b, CLUSTER, "llama3.py:llama_8b", pins, options)
    by_ops_s = planned.plan.prediction.step_time_s
    layout = layout_from_fix(parse_fix(fix), CLUSTER.device_count, captured().samples)
    arch = arch_of(captured().graph, captured().samples, "llama_8b").arch
    software = default_software("hopper", "gpu", layout.zero)
    by_layers_s = estimate(arch, CLUSTER, layout, software, "bf16").step_time_s
    assert by_ops_s == pytest.approx(by_layers_s, rel=APART)
