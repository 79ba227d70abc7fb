"""What an export writes, an import reads back: the same layout, wherever the target carries it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from autopar.cli.exports import of_layout
from autopar.cli.imports import layout_of
from autopar.emit.exports.targets import TARGETS
from autopar.emit.exports.text import Refused
from autopar.files.cluster_file import load_cluster
from autopar.files.imports.readers import READERS
from autopar.frontends.family.arch import Arch
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import ATTENTION, FULL, KEEP_ALL, Recompute
from autopar.planner.family.legal import illegal
from autopar.planner.family.pins import RECOMPUTES

ROOT = Path(__file__).parents[3]
ARCH = Arch("mixture", 16, 1024, 16, 8, 2048, 32000, 4096, experts=8, top_k=2)
CLUSTER = load_cluster(ROOT / "examples/clusters/h100_8x8.yaml")
POWERS = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn, target: str) -> Layout:
    """Legal layouts of any number of devices, as trainers name them: ZeRO 0 has replicas alone.

    What ``target`` refuses in any case is not drawn.
    """
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    pp = draw(POWERS) if target in ("torchtitan", "megatron") else 1
    interleave = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    schedules = ["interleaved-1f1b", "zb-interleaved"] if interleave > 1 else ["1f1b", "gpipe"]
    shard = 1 if zero == 0 else draw(st.sampled_from([2, 4]))
    replicate = 1 if target == "deepspeed" and zero else draw(POWERS)
    microbatch, microbatches = draw(POWERS), draw(st.sampled_from([4, 8]))
    ep = 1 if target == "accelerate" else draw(POWERS)
    tp = draw(POWERS)
    cp = 1 if target == "deepspeed" and tp > 1 else draw(st.sampled_from([1, 2]))
    heads = {"deepspeed": [cp], "megatron": [1, cp]}.get(target, [1])
    layout = Layout(
        global_batch=shard * replicate * microbatch * microbatches,
        microbatch=microbatch,
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        cp=cp,
        cp_head=draw(st.sampled_from(heads)),
        ep=ep,
        pp=pp,
        zero=zero,
        schedule=draw(st.sampled_from(schedules)) if pp > 1 else "1f1b",
        interleave=interleave,
        recompute=draw(st.sampled_from(RECOMPUTES)),
        sequence_parallel=draw(st.booleans()) if tp > 1 else True,
        etp=1 if ep > 1 else 0,
    )
    assume(not illegal(ARCH, layout, layout.device_count))
    return layout


def carried(layout: Layout, target: str) -> Layout:
    """What is left of a layout that ``target`` was told; what is missing, its comments say."""
    changes: dict[str, Any] = {}
    if target in ("torchtitan", "accelerate") and layout.zero == 1:
        changes["zero"] = 2
    if target == "torchtitan" and layout.zero == 0 and layout.cp > 1:
        changes["zero"] = 2
    if target == "megatron" and layout.ep > 1 and layout.tp > 1:  # asserted there
        changes["sequence_parallel"] = True
    if target == "deepspeed":
        changes["recompute"] = KEEP_ALL
        changes["sequence_parallel"] = layout.tp == 1
    if target == "accelerate":
        changes["sequence_parallel"] = True
        shards = layout.zero > 0
        if layout.recompute.policy == ATTENTION or not shards:
            again = shards and layout.recompute.runs_again
            changes["recompute"] = Recompute(FULL) if again else KEEP_ALL
    return replace(layout, **changes)


@pytest.mark.parametrize("target", READERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_layout_comes_back(target: str, data: st.DataObject) -> None:
    layout = data.draw(layouts(target))
    setup = of_layout("any", ARCH, layout, CLUSTER, "bf16")
    try:
        made = TARGETS[target](setup)
    except Refused:
        assume(False)
        raise
    name, text = next(iter(made.files.items()))
    imported = READERS[target](text, name)
    assert imported.precision == "bf16"
    batch = layout.global_batch if target == "accelerate" else None
    back = layout_of(imported, layout.device_count, batch)
    if target == "accelerate":  # the script loads the microbatch
        back = replace(back, microbatch=layout.microbatch)
    assert replace(back, global_batch=layout.global_batch) == carried(layout, target)
    has_batch = target in ("torchtitan", "megatron")
    assert imported.global_batch == (layout.global_batch if has_batch else None)
    if target == "deepspeed":
        assert back.global_batch == layout.global_batch
