"""A lowered transformer summed up as published software runs it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autopar.lowering.lowered import Lowered
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
from autopar.pricing.software.routed import routed_elements
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.software.unit import unit_of
from autopar.pricing.summary import Summary
from autopar.pricing.units.held import StageBytes


def summary_of(
    lowered: Lowered, prices: Prices, trainer: Trainer, known: Summary | None = None
) -> Summary:
    """Of a whole model, or of the part of it that is a stage. ``known``: of the whole."""
    whole = {} if known is None else known.bodies
    bodies = {
        name: whole.get(name) or unit_of(_figures(body, prices, trainer), trainer)
        for name, body in lowered.blocks.items()
    }
    return Summary(
        root=unit_of(_figures(lowered, prices, trainer), trainer),
        bodies=bodies,
        calls=_calls(lowered),
        copies=_copies(lowered),
        lives={},
        buffer_bytes=0,
        whole=bodies,
    )


def held_of(
    lowered: Lowered, prices: Prices, trainer: Trainer, calls: Mapping[str, int]
) -> StageBytes:
    """All that the software holds of a stage; ``calls``: of its layers, by kind."""
    layers = {name: _figures(lowered.blocks[name], prices, trainer) for name in calls}
    root = _figures(lowered, prices, trainer)
    own = {name: of.parameters for name, of in layers.items()}
    experts = {name: routed_elements(of, trainer) for name, of in layers.items()}
    outside = root.parameters + sum(count * own[name] for name, count in calls.items())
    routed = sum(count * experts[name] for name, count in calls.items())
    parameters, gradients, optimizer = states_bytes(trainer, outside, routed)
    own_saved = sum(count * saved_bytes(layers[name], trainer) for name, count in calls.items())
    saved = round(own_saved + handed_on_bytes(root, trainer))
    working = [working_bytes(of, trainer) for of in layers.values()]
    largest = max((own[name] + experts[name] for name in layers), default=0.0)
    return StageBytes(
        parameters=round(parameters),
        gradients=round(gradients),
        optimizer=round(optimizer),
        host=0,
        saved=saved,
        pending=saved,
        passing=round(max([*working, loss_bytes(root, trainer)])),
        casts=0,
        gathered=round(gathered_bytes(trainer, root, largest, sum(calls.values()))),
        packages=frozenset(),
    )


def _calls(lowered: Lowered) -> tuple[str, ...]:
    return tuple(op.op.attrs["block"] for op in lowered.ops if op.bound is None)


def _copies(lowered: Lowered) -> dict[str, int]:
    blocks = lowered.graph.blocks
    return {name: len(dict.fromkeys(blocks[name].instances)) for name in lowered.blocks}


def _figures(part: Lowered, prices: Prices, trainer: Trainer) -> Figures:
    """Read off once for all layouts that have the same model axes."""
    key: Hashable = part.block or tuple(op.op.name for op in part.ops if op.bound is not None)
    if key not in prices.figures:
        apart = trainer.layout.sequence_parallel
        read = figures_of(part, prices.fusion, apart) if part.block else ends_of(part)
        prices.figures[key] = read
    return prices.figures[key]
