"""Each op kind as Python: the expression of one rank's part of an op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.emit.implementations import arguments
from autopar.emit.pytorch import (
    elementwise,
    experts,
    feed_forward,
    fourier,
    layers,
    reductions,
    shapes,
)
from autopar.emit.pytorch.generic import generic
from autopar.emit.pytorch.site import Printer, Site
from autopar.emit.text import Expr

PRINTERS: Mapping[str, Printer] = {
    **layers.PRINTERS,
    **elementwise.PRINTERS,
    **reductions.PRINTERS,
    **shapes.PRINTERS,
    **fourier.PRINTERS,
    **experts.PRINTERS,
    **feed_forward.PRINTERS,
}


def expression(site: Site) -> Expr:
    """The expression for all results of ``site`` (a tuple where there are several)."""
    site = replace(site, beside=arguments(site.at, "pytorch", site.whole, site.lowered.order))
    printer = PRINTERS.get(site.kind)
    expr = printer(site) if printer is not None else generic(site)
    reads = frozenset().union(*(a.reads for a in site.args), expr.reads)
    if site.bias is not None:
        reads |= site.bias.reads
    weight = sum(a.weight for a in site.args) + expr.weight
    return Expr(expr.text, expr.level, reads, weight)
