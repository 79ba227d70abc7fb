"""Whether a plan places experts on ranks by their rows, where these are known.

The search prices every number of ranks as experts would be placed there (`Order`); here what has
won is priced with experts in order too, and they stay so unless placing them is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.lowering.placed_experts import ranks_of
from autopar.nouns.expert_placement import BY_LOAD, IN_ORDER, ExpertPlacement
from autopar.nouns.imbalance import Imbalance
from autopar.nouns.layout import EXPERT_PLACEMENT, LayoutError, Pins
from autopar.planner.ask.question import Answer, Outcome, Question
from autopar.planner.solve.solved import lowered_of
from autopar.planner.staged.in_full import priced_again
from autopar.rules.balanced_experts import by_load
from autopar.rules.uneven_routes import Order, as_placed, balanced, in_order, with_imbalance

GAIN = 0.001
"""Of the step, or of the memory, that placing must save: programs say nothing of it where nothing
hangs on it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """placement: what the plan is to say; nothing where experts stay in order. ``saved_s``: of the
    step, which it saves. ``question`` and ``outcome``: at its price."""

    question: Question
    outcome: Outcome
    placement: Mapping[str, ExpertPlacement] = field(default_factory=dict)
    saved_s: float = 0.0


def check_placement_pin(pins: Pins, framework: str, imbalance: Imbalance | None) -> None:
    """Raises `LayoutError` where experts are to be placed by rows and programs of the framework
    cannot, or nobody knows the rows."""
    if pins.expert_placement != BY_LOAD:
        return
    text = f"--fix {EXPERT_PLACEMENT}={BY_LOAD}"
    if framework != "torch":
        raise LayoutError(
            f"{text}: JAX programs have experts in their order, as stacks of matrices that XLA "
            "cuts; leave it out"
        )
    if imbalance is None or not imbalance.loads:
        raise LayoutError(
            f"{text} needs the rows of each expert, which are not known: measure them by `autopar "
            "run PLAN --profile profile.db` and plan with --profile profile.db (and without "
            "--expert-imbalance, which takes its place), or give them as --expert-loads FILE"
        )


def order_of(pins: Pins) -> Order:
    """How the search is to take experts to lie."""
    return in_order if pins.expert_placement == IN_ORDER else balanced


def placed_experts(question: Question, outcome: Outcome, imbalance: Imbalance | None) -> Placed:
    """Raises `LayoutError` where it is pinned and ranks share no experts that may be placed."""
    if imbalance is None or not imbalance.loads:
        return Placed(question, outcome)
    pinned, best = question.pins.expert_placement, outcome.best
    shared = ranks_of(lowered_of(question, best.decided))
    placement = {
        name: ExpertPlacement.of(order, ranks)
        for name, (layer, ranks) in sorted(shared.items())
        if (loads := imbalance.loads.get(name)) is not None
        and (order := by_load(loads, ranks)) != tuple(range(layer.experts))
    }
    if pinned == BY_LOAD and not shared:
        raise LayoutError(
            f"--fix {EXPERT_PLACEMENT}={BY_LOAD} has no effect on this layout: no ranks share the "
            "experts of a layer; leave it out, or pin ep=2 or more"
        )

    def with_order(order: Order) -> tuple[Question, Answer]:
        devices = outcome.cluster.device_count
        graph = with_imbalance(question.graph, imbalance, order, devices)
        asked = replace(question, graph=graph)
        return asked, priced_again(asked, best)

    natural, in_turn = with_order(in_order)
    if pinned == IN_ORDER or not placement:
        return Placed(natural, replace(outcome, best=in_turn))
    asked, placed = with_order(as_placed(placement))
    saved_s = in_turn.priced.time.total_s - placed.priced.time.total_s
    if pinned != BY_LOAD and not _is_worth(in_turn, placed):
        return Placed(natural, replace(outcome, best=in_turn))
    return Placed(asked, replace(outcome, best=placed), placement, saved_s)


def _is_worth(natural: Answer, placed: Answer) -> bool:
    """Whether a step takes or holds notably less with experts placed."""
    before, after = natural.priced, placed.priced
    if after.memory.fits and not before.memory.fits:
        return True
    saved_s = before.time.total_s - after.time.total_s
    saved = before.memory.total - after.memory.total
    return saved_s >= GAIN * before.time.total_s or (
        saved_s >= 0 and saved >= GAIN * before.memory.total
    )
