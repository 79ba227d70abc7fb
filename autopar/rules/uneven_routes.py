"""A graph whose experts say how unevenly routes go to them.

Where the rows of each expert are known, those of a rank are their sum, of the experts that an
`Order` gives it: the search prices every number of ranks as experts would be placed there, and a
plan as it places them. A block is as busy as its layers are in the mean: they run one after the
other, so that their times add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.nouns.expert_placement import ExpertPlacement, busiest_over_mean
from autopar.nouns.graph import Graph, Op, with_ops
from autopar.nouns.imbalance import Imbalance, ImbalanceError, busiest_rank, spread
from autopar.nouns.layout import divisors
from autopar.rules.balanced_experts import by_load
from autopar.rules.expert_layers import ExpertLayer, expert_layers
from autopar.rules.experts import IMBALANCE

Loads = tuple[float, ...]
Order = Callable[[str, Loads, int], Sequence[int]]
"""The expert at each place, given the name of a layer, its loads, and the ranks that share it."""


def in_order(layer: str, loads: Loads, ranks: int) -> Sequence[int]:
    """As the model numbers them."""
    del layer, ranks
    return range(len(loads))


def balanced(layer: str, loads: Loads, ranks: int) -> Sequence[int]:
    """So that the busiest rank has least."""
    del layer
    return by_load(loads, ranks)


def as_placed(placement: Mapping[str, ExpertPlacement]) -> Order:
    """As a plan places them; what it does not name is in order."""

    def order(layer: str, loads: Loads, ranks: int) -> Sequence[int]:
        placed = placement.get(layer)
        return in_order(layer, loads, ranks) if placed is None else placed.experts

    return order


def with_imbalance(
    graph: Graph, imbalance: Imbalance | None, order: Order = in_order, devices: int = 1
) -> Graph:
    """``graph`` with the imbalance at every layer of experts; itself where routes are even.

    A worst step beyond what a layer can have is taken as that. order: of experts whose loads are
    known, as far as they may be placed, on as many ranks as ``devices`` can be.
    """
    if imbalance is None or imbalance.even:
        return graph
    layers = {id(layer.op): layer for layer in expert_layers(graph)}

    def of(part: Graph, op: Op) -> Op:
        del part
        if op.kind != "experts":
            return op
        layer = layers[id(op)]
        most = _most(layer)
        attr: tuple[object, ...] = (min(imbalance.mean, most), min(imbalance.worst, most))
        if any(name in imbalance.loads for name in layer.modules):
            asked = (n for n in divisors(layer.experts) if n <= devices)
            attr += (tuple((n, *_of_ranks(layer, imbalance, order, n)) for n in asked),)
        return replace(op, attrs={**op.attrs, IMBALANCE: attr})

    return with_ops(graph, of)


def _of_ranks(
    layer: ExpertLayer, imbalance: Imbalance, order: Order, ranks: int
) -> tuple[float, float]:
    """(in the mean of steps, in the worst): the busiest rank's rows over the mean, in the mean of
    the instances of a block."""
    beyond = [more * spread(layer.experts, ranks) for more in imbalance.beyond]
    most = ranks * min(1.0, layer.experts / ranks / layer.routes)  # where all go to one rank
    totals = [0.0, 0.0]
    for name in layer.modules:
        loads = imbalance.loads.get(name)
        if loads is None:
            own = [
                busiest_rank(each, layer.experts, ranks)
                for each in (imbalance.mean, imbalance.worst)
            ]
        else:
            lie = order if layer.placeable else in_order
            known = busiest_over_mean(loads, lie(name, loads, ranks), ranks)
            own = [min(most, known + more) for more in beyond]
        totals = [total + one for total, one in zip(totals, own, strict=True)]
    mean, worst = (total / len(layer.modules) for total in totals)
    return mean, worst


def check_imbalance(graph: Graph, imbalance: Imbalance) -> None:
    """Raises `ImbalanceError` where the model has no experts, or some that cannot be so busy, and
    for loads of layers that it does not have."""
    layers = list(expert_layers(graph))
    if not layers:
        asked = imbalance.source if imbalance.loads else f"--expert-imbalance {imbalance.mean:g}"
        raise ImbalanceError(
            f"{asked}: the model has no layer of experts that routes go to; leave it out"
        )
    if imbalance.loads:
        _check_loads(layers, imbalance)
        return
    for layer in layers:
        if imbalance.mean > (most := _most(layer)):
            raise ImbalanceError(
                f"--expert-imbalance {imbalance.mean:g}: of the {layer.experts} experts at "
                f"{layer.op.source} a token goes to {layer.routes}, so the busiest has at most "
                f"{layer.experts} / {layer.routes} = {most:g} times the mean; give a number from 1 "
                f"to {most:g}"
            )


def _check_loads(layers: Iterable[ExpertLayer], imbalance: Imbalance) -> None:
    known = {name: layer for layer in layers for name in layer.modules}
    for name, loads in imbalance.loads.items():
        if name not in known:
            has = ", ".join([*known][:4]) or "none whose rows are counted by layer"
            more = f" and {len(known) - 4} more" if len(known) > 4 else ""
            raise ImbalanceError(
                f"loads of experts ({imbalance.source}) name {name!r}, which is no module that "
                f"holds a layer's experts; there are {has}{more}"
            )
        if len(loads) != known[name].experts:
            raise ImbalanceError(
                f"loads of experts ({imbalance.source}) have {len(loads)} numbers for {name}, "
                f"which has {known[name].experts} experts; give one for each"
            )


def _most(layer: ExpertLayer) -> float:
    """Where every token goes to one expert, that one over the mean."""
    return layer.experts / layer.routes
