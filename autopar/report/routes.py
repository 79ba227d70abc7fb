"""How unevenly routes go to experts: what a plan takes, and what a run had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.text import Text

from autopar.nouns.expert_placement import busiest_over_mean
from autopar.nouns.imbalance import Imbalance, spread
from autopar.nouns.plan import Plan
from autopar.report.units import duration


def routes_text(routes: Imbalance) -> str:
    """``the busiest expert has 1.3 times the mean, 1.6 in the worst step (--expert-imbalance)``"""
    ranks = (
        "ranks have what their experts have"
        if routes.loads
        else "ranks with several experts are evener"
    )
    return (
        f"the busiest expert has {routes.mean:.3g} times the mean, {routes.worst:.3g} in the worst "
        f"step ({routes.source}); {ranks}"
    )


def routes_lines(plan: Plan) -> list[Text]:
    """The same as sentences; none where a plan takes routes as even."""
    if plan.expert_imbalance is None:
        return []
    placing = placement_text(plan)
    lines = [f"Routes: {routes_text(plan.expert_imbalance)}."]
    return [Text(line) for line in (*lines, *([f"Placing experts: {placing}."] if placing else []))]


def placement_text(plan: Plan) -> str:
    """``the busiest rank has 1.1 times the mean, in order 1.8; a step 5.1 ms, in order 5.9 ms``,
    in the mean of the layers whose experts are placed; empty where none are."""
    placing = placement_object(plan)
    if placing is None:
        return ""
    return (
        f"the busiest rank has {placing['placed']:.3g} times the mean, with experts in order "
        f"{placing['in_order']:.3g}; a step {duration(placing['step_time_s'])}, in order "
        f"{duration(placing['in_order_step_time_s'])}"
    )


def placement_object(plan: Plan) -> dict[str, float] | None:
    """What placing experts by their rows changes, as it is priced; None where none are placed."""
    routes = plan.expert_imbalance
    if not plan.expert_placement or routes is None:
        return None
    known = [(n, own) for n, own in plan.expert_placement.items() if n in routes.loads]
    if not known:
        return None

    def busiest(rows: tuple[float, ...], order: Iterable[int], ranks: int) -> float:
        beyond = routes.beyond[0] * spread(len(rows), ranks)
        return min(float(ranks), busiest_over_mean(rows, order, ranks) + beyond)

    pairs = [
        (
            busiest(routes.loads[name], placed.experts, len(placed.ranks)),
            busiest(routes.loads[name], range(len(placed.experts)), len(placed.ranks)),
        )
        for name, placed in known
    ]
    step_time_s = plan.prediction.step_time_s
    return {
        "placed": sum(placed for placed, _ in pairs) / len(pairs),
        "in_order": sum(ordered for _, ordered in pairs) / len(pairs),
        "step_time_s": step_time_s,
        "in_order_step_time_s": step_time_s + plan.prediction.placing_saves_s,
    }


def routes_measured(routes: Mapping[str, float], planned: Imbalance | None) -> str:
    """How uneven routes were, beside what the plan was priced with."""
    ranks = ""
    if routes["ranks"] > 1:
        ranks = (
            f"; the busiest of {routes['ranks']:.0f} ranks {routes['rank_mean']:.2f} "
            f"({routes['rank_worst']:.2f})"
        )
    priced = "even routes" if planned is None else f"{planned.mean:.2f} ({planned.worst:.2f})"
    return (
        f"routes: the busiest expert had {routes['mean']:.2f} times the mean (at worst "
        f"{routes['worst']:.2f}){ranks}; the plan is priced with {priced}"
    )
