"""A lowered transformer summed up as published software runs it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopar.lowering.spread import Lowered
from autopar.pricing.prices import Prices
from autopar.pricing.software.figures import Figures
from autopar.pricing.software.memory import (
    gathered_bytes,
    handed_on_bytes,
    loss_bytes,
    saved_bytes,
    states_bytes,
    working_bytes,
)
from autopar.pricing.software.reading import ends_of, figures_of
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.software.unit import unit_of
from autopar.pricing.summary import Summary
from autopar.pricing.units.held import StageBytes
from autopar.pricing.units.unit import Unit


def summary_of(
    lowered: Lowered, prices: Prices, trainer: Trainer, known: Summary | None = None
) -> Summary:
    """Of a whole model, or of the part of it that is a stage. ``known``: of the whole."""
    each = {name: _figures(body, prices, trainer) for name, body in lowered.blocks.items()}
    ends = _figures(lowered, prices, trainer)
    whole = {} if known is None else known.bodies
    bodies = {name: whole.get(name) or unit_of(of, trainer) for name, of in each.items()}
    root = unit_of(ends, trainer)
    calls = tuple(op.op.attrs["block"] for op in lowered.ops if op.bound is None)
    copies = {name: len(dict.fromkeys(lowered.graph.blocks[name].instances)) for name in bodies}
    owners = [(root, 1), *((bodies[name], count) for name, count in copies.items())]
    return Summary(
        root=root,
        bodies=bodies,
        calls=calls,
        copies=copies,
        lives={},
        buffer_bytes=0,
        whole=bodies,
        held=_held(trainer, ends, each, calls, owners),
    )


def _held(
    trainer: Trainer,
    root: Figures,
    layers: Mapping[str, Figures],
    calls: Sequence[str],
    owners: Sequence[tuple[Unit, int]],
) -> StageBytes:
    """owners: what lies outside the layers, then each kind of them, with their number."""
    saved = {name: saved_bytes(of, trainer) for name, of in layers.items()}
    working = [working_bytes(of, trainer) for of in layers.values()]
    parameters, gradients, optimizer = states_bytes(trainer, owners)
    return StageBytes(
        parameters=round(parameters),
        gradients=round(gradients),
        optimizer=round(optimizer),
        host=0,
        saved=round(sum(saved[name] for name in calls) + handed_on_bytes(root, trainer)),
        passing=round(max([*working, loss_bytes(root, trainer)])),
        casts=0,
        gathered=round(gathered_bytes(trainer, root, owners[1:])),
        packages=frozenset(),
    )


def _figures(part: Lowered, prices: Prices, trainer: Trainer) -> Figures:
    """With the tokens of one context rank; read off once for all layouts that have the same model
    axes."""
    key: Hashable = part.block or tuple(op.op.name for op in part.ops if op.bound is not None)
    whole, ways = (key, 1), trainer.layout.cp
    if whole not in prices.figures:
        apart = trainer.layout.sequence_parallel
        read = figures_of(part, prices.fusion, apart) if part.block else ends_of(part)
        prices.figures[whole] = read
    if (key, ways) not in prices.figures:
        prices.figures[key, ways] = prices.figures[whole].over(ways)
    return prices.figures[key, ways]
