"""Which layouts of a transformer by figures can be."""

from __future__ import annotations

from autopar.frontends.family.arch import Arch
from autopar.nouns.layout import Layout, LayoutError
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES, kind_of
from autopar.planner.family.stages import stage_count


def check_layout(arch: Arch, layout: Layout, device_count: int) -> None:
    """Refuse a layout that cannot run.

    Raises:
        LayoutError: every rule that it breaks, each with its formula and numbers.
    """
    broken = illegal(arch, layout, device_count)
    if broken:
        raise LayoutError("; ".join(broken))


def illegal(arch: Arch, layout: Layout, device_count: int) -> list[str]:
    """One sentence for every rule that `layout` breaks."""
    x, broken = layout, []
    if x.device_count != device_count:
        broken.append(
            f"dp_replicate {x.dp_replicate} x dp_shard {x.dp_shard} x cp {x.cp} x tp {x.tp} x pp "
            f"{x.pp} = {x.device_count}, but the cluster has {device_count} devices"
        )
    for what, size in (("heads", arch.heads), ("ffn", arch.ffn)):
        if size % x.tp:
            broken.append(f"tp {x.tp} does not divide {what} {size}")
    if arch.latent is None and arch.kv_heads % x.tp and x.tp % arch.kv_heads:
        broken.append(f"tp {x.tp} and kv_heads {arch.kv_heads}: neither divides the other")
    stages = stage_count(x)
    least = arch.layers // stages
    can_be = arch.layers + 2 >= stages  # the embedding and the head may be stages of their own
    if arch.layers % stages and not x.uneven:
        way = f" (add uneven=on for stages of {least} and {least + 1})" if can_be else ""
        broken.append(f"{_stages(x)} = {stages} stages do not divide {arch.layers} layers{way}")
    elif not can_be:
        broken.append(
            f"{_stages(x)} = {stages} stages for {arch.layers} layers: some would have none"
        )
    if x.interleave > 1 and x.pp == 1:
        broken.append(f"interleave {x.interleave} needs pp > 1")
    if x.global_batch % (x.dp * x.microbatch):
        each = x.dp * x.microbatch
        less = x.global_batch // each * each
        near = f"{less} or {less + each}" if less else f"{each}"
        broken.append(
            f"dp {x.dp} x microbatch {x.microbatch} = {each} does not divide the global batch "
            f"{x.global_batch}; give --global-batch {near}, or fewer data ranks"
        )
    elif x.pp > 1:
        try:
            kind_of(x.schedule, x.pp, x.microbatches, x.interleave)
        except ScheduleError as error:
            broken.append(str(error))
    broken += _heads(arch, x)
    if x.cp > 1 and arch.seq % (2 * x.cp):
        broken.append(f"2 x cp {x.cp} chunks do not divide the sequence {arch.seq}")
    if x.tp > 1 and x.sequence_parallel and (arch.seq // x.cp) % x.tp:
        broken.append(f"sequence parallel: tp {x.tp} does not divide the sequence {arch.seq}")
    broken += _experts(arch, x)
    if x.zero == 3 and x.pp > 1 and x.microbatches > 1 and x.schedule == "gpipe":
        broken.append("zero 3 under gpipe would gather every parameter for every microbatch twice")
    return broken


def _stages(x: Layout) -> str:
    """What multiplies to the number of stages."""
    waves = SCHEDULES[x.schedule].stages
    return f"pp {x.pp} x interleave {x.interleave}" + (f" x {waves}" if waves > 1 else "")


def _heads(arch: Arch, x: Layout) -> list[str]:
    """Of what ranks of a sequence trade rows for."""
    if x.cp_head == 1:
        return []
    if x.cp_ring > 1:
        return [
            f"cp_ring {x.cp_ring} x cp_head {x.cp_head}: layouts of architecture figures split "
            f"rows of attention or heads, not both so far; take cp_head={x.cp} or cp_ring={x.cp}, "
            "or give `autopar plan` a model"
        ]
    broken, ranks = [], x.tp * x.cp_head
    if arch.heads % ranks:
        broken.append(f"tp {x.tp} x cp_head {x.cp_head} does not divide heads {arch.heads}")
    if arch.latent is None and arch.kv_heads % ranks and ranks % arch.kv_heads:
        broken.append(
            f"tp {x.tp} x cp_head {x.cp_head} and kv_heads {arch.kv_heads}: neither divides the "
            "other"
        )
    return broken


def _experts(arch: Arch, x: Layout) -> list[str]:
    """Of what splits experts."""
    broken = []
    if x.ep > 1 and not arch.is_moe:
        broken.append(f"ep {x.ep} for a model without experts")
    elif x.ep > 1:
        if arch.experts % x.ep:
            broken.append(f"ep {x.ep} does not divide {arch.experts} experts")
        if (x.tp * x.cp * x.dp) % x.ep:
            broken.append(
                f"ep {x.ep} does not divide tp {x.tp} x cp {x.cp} x dp {x.dp} = "
                f"{x.tp * x.cp * x.dp}"
            )
    if x.etp > 1 and not arch.is_moe:
        broken.append(f"etp {x.etp} for a model without experts")
    elif x.etp and arch.is_moe:
        if x.tp % x.etp:
            broken.append(f"etp {x.etp} does not divide tp {x.tp}, whose ranks it takes")
        if arch.ffn % x.etp:
            broken.append(f"etp {x.etp} does not divide the experts' ffn {arch.ffn}")
        if (x.tp * x.cp * x.dp) % (x.ep * x.etp):
            broken.append(
                f"etp {x.etp} x ep {x.ep} = {x.ep * x.etp} does not divide tp {x.tp} x cp {x.cp} "
                f"x dp {x.dp} = {x.tp * x.cp * x.dp}"
            )
    return broken
