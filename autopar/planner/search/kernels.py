"""By which kernels the ops of a plan run: the fastest of those that its devices have.

A kernel moves nothing between ranks that torch's ops do not, holds no more than they do, and is
faster whatever a sharding leaves of the op; so each site has its kernel before shardings are
searched, and these are priced with it. An attention whose rows are split runs by calls of its own,
whatever kernel is named for it: none is then in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.compute import KERNEL
from autopar.cost_models.rates import attention_share, fitted
from autopar.lowering.lowered import Lowered
from autopar.lowering.of_plan import kernels_beside_calls
from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.errors import did_you_mean
from autopar.nouns.graph import Graph
from autopar.nouns.kernels import kernel_of
from autopar.nouns.layout import ATTENTION_BY, CHUNKS, KERNELS, LayoutError, Pins, alternatives
from autopar.rules.implementations.kernels import Kernel, all_kernels, kernels_of
from autopar.rules.kernels import Site, kernels_in, sites

LEFT_TO_TORCH = "torch"
"""No kernel is named: ops stay as they are."""
_PINS = (ATTENTION_BY, KERNELS)


def asked_kernels(
    graph: Graph, pins: Pins, framework: str, style: str, cluster: Cluster
) -> dict[str, str]:
    """What each site is to run by, by its key: the pinned kernel, else the fastest.

    Raises `LayoutError` where a pinned kernel cannot be; says which op is against it.
    """
    _check(pins, framework, style)
    if framework != "torch":
        return {}
    devices = [kind.device for kind in cluster.kinds]
    asked: dict[str, str] = {}
    for pin in _PINS:
        name = getattr(pins, pin)
        at = [s for s in sites(graph) if (s.kind == "attention") == (pin == ATTENTION_BY)]
        if pin == KERNELS and style != "eager":
            at = [site for site in at if style == "layers" and site.part is graph]
        if name == LEFT_TO_TORCH:
            continue
        if name is not None:
            where = "" if style == "eager" else " outside of its compiled layers"
            asked.update(_pinned(f"--fix {pin}={name}", name, at, devices, where))
        else:
            chosen = ((s.key, _fastest(s, devices)) for s in at)
            asked.update({where: best.text for where, best in chosen if best is not None})
    return asked


def kernels_run(graph: Graph, lowered: Lowered, pins: Pins) -> dict[str, str]:
    """The kernels of ``graph`` that run under the shardings of ``lowered``.

    Raises `LayoutError` where one is pinned for an op that runs by calls of its own, or for none.
    """
    own = kernels_beside_calls(lowered)
    for op in own.values():
        if pins.attention is not None:
            over = (axis for axes in op.implementations.values() for axis in axes)
            axes = " and ".join(dict.fromkeys(over))
            raise LayoutError(
                f"--fix {ATTENTION_BY}={pins.attention} has no effect on the attention at "
                f"{op.op.source}: its rows are split over {axes}, which is a call of its own; "
                f"leave {ATTENTION_BY} out, or split heads in place of rows (cp_head)"
            )
    run = {where: name for where, name in kernels_in(graph).items() if where not in own}
    pinned = pins.kernels
    if pinned not in (None, LEFT_TO_TORCH) and pinned not in {
        kernel_of(t)[1] for t in run.values()
    }:
        raise LayoutError(
            f"--fix {KERNELS}={pinned}: the plan has nothing that runs by it, for logits are made "
            f"whole; leave {KERNELS} out, or pin {CHUNKS}=1"
        )
    return run


def _check(pins: Pins, framework: str, style: str) -> None:
    for pin in _PINS:
        name = getattr(pins, pin)
        if name in (None, LEFT_TO_TORCH):
            continue
        text = f"--fix {pin}={name}"
        if framework != "torch":
            raise LayoutError(f"{text}: XLA chooses the kernels of JAX programs; leave {pin} out")
        if pin == KERNELS and style == "compiled":
            raise LayoutError(
                f"{text}: compiled programs leave kernels to the compiler; leave {pin} out, or say "
                "--style layers or eager"
            )
        of = [r for r in all_kernels() if (r.kind == "attention") == (pin == ATTENTION_BY)]
        names = sorted({row.name for row in of} | {LEFT_TO_TORCH})
        if name not in names:
            raise LayoutError(
                f"{text}: no such kernel. {did_you_mean(name, names)}There are "
                f"{alternatives(names)}"
            )


def _pinned(
    text: str, name: str, at: Sequence[Site], devices: Sequence[Device], where: str
) -> dict[str, str]:
    rows = {row.kind: row for row in all_kernels() if row.name == name}
    meant = [site for site in at if site.kind in rows]
    if not meant:
        kinds = alternatives(sorted(rows))
        raise LayoutError(
            f"{text}: the model has no {kinds}{where} that it could run; leave it out"
        )
    for site in meant:
        row = rows[site.kind]
        against = next(filter(None, map(row.runs_on, devices)), "") or row.computes(
            site.op, site.part.tensors
        )
        if against:
            raise LayoutError(
                f"{text} cannot run the {site.kind} at {site.op.source}: {against}; leave it out"
            )
    return {site.key: rows[site.kind].text for site in meant}


def _fastest(site: Site, devices: Sequence[Device]) -> Kernel | None:
    """None: what is usual is as fast."""
    rows = [
        row
        for row in kernels_of(site.kind)
        if row.by_itself
        and not any(row.runs_on(device) for device in devices)
        and not row.computes(site.op, site.part.tensors)
    ]
    if site.kind != "attention":
        return max(rows, key=lambda row: (row.speed, row.own), default=None)
    head_dim = site.part.tensors[site.op.inputs[0]].shape[3]

    def reached(rate: str, speed: float = 1.0) -> float:
        """Of the device's peak, on the device that reaches least."""
        shares = (attention_share(d, rate or KERNEL, head_dim, fitted()) for d in devices)
        return speed * min(shares)

    best = max(rows, key=lambda row: reached(row.rate, row.speed), default=None)
    return best if best is not None and reached(best.rate, best.speed) > reached(KERNEL) else None
