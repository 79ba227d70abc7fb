"""One step of a resharding as a call, which both runtimes name alike."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE
from autopar.rules.resharding import Step

SCATTER = "reduce_scatter"
_GATHER = "gather({x}, dim={source.dim}, axis={axis}{backward}{order}{first})"
_SHARD = "shard({x}, dim={target.dim}, axis={axis}{backward}{order})"
CALLS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("R", "D"): "copy_to({x}, {axis})",
        ("P", "D"): "copy_to(all_reduce({x}, {axis}), {axis})",
        ("P", "R"): "all_reduce({x}, {axis})",
        ("R", "P"): "keep_first({x}, {axis})",
        ("D", "P"): 'keep_first({x}, {axis}, backward="keep_first")',
        ("D", "R"): "whole({x}, {axis})",
        ("S", "P"): "pad({x}, dim={source.dim}{size}, axis={axis}{order})",
        ("P", "S"): "reduce_scatter({x}, dim={target.dim}, axis={axis}{order}{first})",
        ("S", "R"): _GATHER,
        ("S", "D"): _GATHER,
        ("R", "S"): _SHARD,
        ("D", "S"): _SHARD,
        ("S", "S"): "all_to_all({x}, split={target.dim}, concat={source.dim}, axis={axis}{order})",
    }
)
"""The kinds of the placements before and after -> the call; of what is not here there is none."""


def share_of(step: Step, x: str, ways: int) -> str | None:
    """What is added to a sum over microbatches, or slices of one, which run one after the other:
    each adds an equal share. None for a step that would need another one's value."""
    if step.target != PARTIAL or step.source not in (WHOLE, DEFERRED):
        return None
    return f"({x}) / {ways}" if " " in x else f"{x} / {ways}"


def call_of(
    step: Step, kinds: tuple[str, str], x: str, size: str = "", first: int | None = None
) -> str:
    """The call of ``kinds`` on the variable ``x``; ``size``: an argument of what is padded;
    ``first``: of a reduce-scatter in two (`autopar.nouns.scatters`)."""
    backward = "" if step.backward == "none" else f', backward="{step.backward}"'
    zigzag = [placed.dim for placed in (step.source, step.target) if placed.zigzag]
    order = ', order="zigzag"' if zigzag else ""
    if zigzag and kinds == ("S", "S"):
        order = f", zigzag={zigzag[0]}"
    return CALLS[kinds].format(
        x=x,
        axis=f'"{step.axis}"',
        source=step.source,
        target=step.target,
        backward=backward,
        size=size,
        order=order,
        first=f", first={first}" if first and SCATTER in (step.forward, step.backward) else "",
    )
