"""Feed-forward parts in chunks as Python: a call, and a function for what stands between their
products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.emit.pytorch.gates import gate_function
from autopar.emit.pytorch.layers import held_by
from autopar.emit.pytorch.site import HEAVY, Printer, Site
from autopar.emit.text import Expr, call

_BETWEEN = "What stands between the products of a feed-forward part, element by element."


def _feed_forward(site: Site) -> Expr:
    """``feed_forward(x, (self.gate, self.up), self.down, gate=between_products, chunks=8)``

    A bias behind the last product is an op of its own."""
    count, biases = site.attrs["ups"], site.attrs["biases"]
    after = count + 2
    ups = []
    for number in range(count):
        places = [number + 1, *([after + biases.index(number)] if number in biases else [])]
        ups.append(_held_layer(site, places))
    several = f"({', '.join(ups)}{',' if count == 1 else ''})"
    names: tuple[str, ...] = ("h",) if count == 1 else ("gate", "up")
    names = names if count <= 2 else tuple(f"h{i}" for i in range(count))
    gate = gate_function(site, names, site.attrs["gate"], _BETWEEN)
    options = [f"gate={site.define('between_products', gate)}", f"chunks={site.attrs['chunks']}"]
    given = [site.args[0].text, several, _held_layer(site, [count + 1]), *options]
    return Expr(call("feed_forward", given), weight=HEAVY)


def _held_layer(site: Site, places: Sequence[int]) -> str:
    """The linear layer that holds the operands at ``places``, a weight and perhaps a bias, else
    these."""
    exprs = [site.args[place] for place in places]
    weight = exprs[0]
    if site.attrs["transposed"]:
        exprs[0] = Expr(f"{weight.atom}.t()")
    else:
        held = dict(zip(("weight", "bias"), exprs, strict=False))
        layer = held_by(site, "Linear", held, [site.at.operands[place] for place in places])
        if layer is not None:
            return layer
    texts = [expr.text for expr in exprs]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


PRINTERS: Mapping[str, Printer] = {"feed_forward": _feed_forward}
