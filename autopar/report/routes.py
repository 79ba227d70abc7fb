"""How unevenly routes go to experts: what a plan takes, and what a run had."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from autopar.nouns.imbalance import Imbalance


def routes_text(routes: Imbalance) -> str:
    """``the busiest expert has 1.3 times the mean, 1.6 in the worst step (--expert-imbalance)``"""
    return (
        f"the busiest expert has {routes.mean:.3g} times the mean, {routes.worst:.3g} in the worst "
        f"step ({routes.source}); ranks with several experts are evener"
    )


def routes_line(routes: Imbalance) -> Text:
    """The same as a sentence."""
    return Text(f"Routes: {routes_text(routes)}.")


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
