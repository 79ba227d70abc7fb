"""In how many pieces of rows tensor-parallel collectives run beside products: what may be pinned.

The search takes for each as many as its price says (`autopar.pricing.tp_pieces`), where it has
settled how ops are split; here a pin is refused that cannot be, or that nothing would follow.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.lowering.lowered import Lowered
from autopar.lowering.pieces import LEAST_ROWS, Site, every_site
from autopar.lowering.shared_experts import sites as shared_sites
from autopar.lowering.stages import stage_parts
from autopar.nouns.axes import OPS
from autopar.nouns.layout import PIECES, PRECISION, LayoutError, Pins
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import Plan
from autopar.planner.ask.question import Question
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.pricing.tp_pieces import priced, site_beside


def check_tp_pieces(pins: Pins, framework: str, style: str) -> None:
    """Raises `LayoutError` where programs of the framework or style have no pieces."""
    pieces = pins.tp_pieces
    if pieces in (None, 1):
        return
    text = f"--fix {PIECES}={pieces}"
    if framework != "torch":
        raise LayoutError(f"{text}: JAX programs leave overlap to XLA; leave it out")
    if style != "eager":
        raise LayoutError(
            f"{text}: compiled programs leave products to the compiler; leave it out, or say "
            "--style eager"
        )
    if pins.precision is not None:
        raise LayoutError(
            f"{text}: layers of {PRECISION}={pins.precision} run in one piece so far; leave one of "
            "the two out"
        )


def check_pieces(question: Question, lowered: Lowered) -> None:
    """Raises `LayoutError` where pinned pieces are cut nowhere, or cannot be where they would."""
    pieces = question.pins.tp_pieces
    if pieces is None or pieces == 1:
        return
    every = [*every_site(lowered)]
    for site, body in every:
        if not site.takes(pieces):
            raise LayoutError(_refusal(site, body, pieces, question.prices(lowered.mesh)))
    if not every:
        split = [axis for axis in OPS if lowered.mesh.size(axis) > 1]
        degrees = " and ".join(f"{axis}={lowered.mesh.size(axis)}" for axis in split)
        instead = f"other ways to split ops than {degrees}" if split else "tp=2 or more"
        raise LayoutError(
            f"--fix {PIECES}={pieces} has no effect on this layout: no gather or sum over tensor-"
            "parallel ranks stands alone between linear layers and what they read or give; leave "
            f"it out, or pin {instead}"
        )


def _refusal(site: Site, body: Lowered, pieces: int, prices: Prices) -> str:
    op = site.products[0].op
    fits = [n for n in COUNTS if n > 1 and site.takes(n)]
    may = f"the most that {op.name} takes is {max(fits)}" if fits else "it takes no pieces"
    text = f"--fix {PIECES}={pieces}: {op.name} at {op.source} "
    if site.part % pieces:
        text += f"has {site.part} rows on a rank for its {site.step.axis} collective, which "
        text += f"{pieces} pieces do not divide; {may}"
        return text
    one = site_beside(prices, site, body)
    text += f"would be cut into pieces of {site.rows // pieces} rows, which is too thin: the least "
    text += f"is {LEAST_ROWS}"
    if one is not None:
        plain, cut = (priced(prices, one, n).total_ps / PICOSECONDS for n in (1, pieces))
        text += f" (its collective takes {1e6 * plain:,.0f} us in one piece, and would add "
        text += f"{1e6 * cut:,.0f} us in {pieces})"
    return f"{text}; {may}"


def with_effect(plan: Plan, lowered: Lowered) -> Plan:
    """The plan without what no stage has: where a cut lies between a collective and its products,
    it is waited for, and where it lies between experts, these run one after the other."""
    if len(plan.stages) < 2 or not (plan.tp_pieces or plan.shared_experts):
        return plan
    parts = [part.lowered for part in stage_parts(lowered, plan.stages)]
    there = {site.key for part in parts for site, _ in every_site(part)}
    beside = {(where, path) for part in parts for where, _, path, _ in shared_sites(part)}
    spreads = (
        replace(
            s,
            pieces={name: n for name, n in s.pieces.items() if name in there},
            beside={name: path for name, path in s.beside.items() if (name, path) in beside},
        )
        for s in plan.spreads
    )
    return replace(plan, spreads=tuple(spreads))
