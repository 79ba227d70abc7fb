"""One GPT written in both frameworks: the same graph, and the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.nouns.graph import Graph
from autopar.planner import Options, PlanResult, plan

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "h100_8.yaml")
# Of plans as fast as each other, the one that needs less memory is taken, and XLA's memory is its
# own: these layouts have one sharding that is clearly the fastest.
FIXED: list[dict[str, str]] = [{}, {"tp": "4"}, {"tp": "2", "dp_shard": "4", "zero": "2"}]


def planned(name: str, fix: dict[str, str]) -> PlanResult:
    """Of one stage and compiled, as JAX has it and PyTorch may."""
    return plan(str(EXAMPLES / name), CLUSTER, {**fix, "pp": "1"}, Options(style="compiled"))


def ops(graph: Graph) -> list[Any]:
    """Kinds, names, operands and attrs, without what is said of one framework only."""
    left_out = ("ignore_index", "torch", "jax", "dtype", "padding_idx", "block", "bias")
    return [
        (
            op.kind,
            op.name,
            op.inputs,
            {k: v for k, v in op.attrs.items() if k not in left_out},
            graph.tensors[op.name].shape,
            graph.tensors[op.name].differentiable,
        )
        for op in graph.ops
    ]


def keyed(choices: Any, result: PlanResult) -> dict[str, str]:
    """Keys with the block's own name replaced: a class in PyTorch, a path in JAX."""
    (block,) = result.captured.graph.blocks
    return {key.replace(f"{block}::", "block::"): value for key, value in choices.items()}


@pytest.mark.parametrize("fix", FIXED, ids=str)
def test_one_gpt_in_both_frameworks_gets_one_plan(fix: dict[str, str]) -> None:
    torch, jax = (planned(name, fix) for name in ("02_gpt.py", "05_gpt_jax.py"))
    (torch_block,) = torch.captured.graph.blocks.values()
    (jax_block,) = jax.captured.graph.blocks.values()
    assert torch_block.instances == jax_block.instances
    assert ops(torch_block.body) == ops(jax_block.body)
    # the lines of the two forwards stand in different order at the top
    tops = [sorted(ops(result.captured.graph), key=str) for result in (torch, jax)]
    assert tops[0] == tops[1]
    a, b = torch.plan, jax.plan
    assert a.degrees == b.degrees
    assert (a.stages, a.microbatches) == (b.stages, b.microbatches)
    for choices in ("ops", "shared", "parameters"):
        left, right = getattr(a.spreads[0], choices), getattr(b.spreads[0], choices)
        assert keyed(left, torch) == keyed(right, jax)
    # between steps of ZeRO 1 and 2 FSDP2 stores pieces of parameters, a JAX program the whole
    pieces = int(fix["dp_shard"]) if fix.get("zero") in ("1", "2") else 1
    held, whole = (plan.prediction.memory_bytes.parameters for plan in (a, b))
    assert whole == pieces * held
