"""Where the numbers of a price come from: measured, fitted or assumed, each with its basis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.cost_models.compute import OP_CLASSES, efficiency
from autopar.cost_models.constants import How, constants
from autopar.cost_models.rates import fitted_table
from autopar.nouns.cluster import Cluster, short_dtype


@dataclass(frozen=True)
class Origin:
    """One number (or group of numbers) that prices of a cluster rest on."""

    what: str
    how: How
    basis: str


def op_origins(cluster: Cluster, dtype: str) -> list[Origin]:
    """The origin of every class of ops in `dtype` on the cluster's device."""
    device, name = cluster.device, short_dtype(dtype)
    measured = {rate.op_class for rate in device.rates if rate.dtype == name}
    origins = []
    for op_class in OP_CLASSES:
        if device.fitted:
            basis = "autopar profile" if op_class in measured else "catalogue"
            origins.append(Origin(f"{op_class} {name}", "fitted", f"{basis}, corrected by runs"))
        elif op_class in measured:
            origins.append(Origin(f"{op_class} {name}", "measured", "autopar profile"))
        else:
            entry = efficiency(device, name, op_class)
            origins.append(Origin(f"{op_class} {name}", entry.how, entry.basis))
    return origins


def collective_origins(cluster: Cluster) -> list[Origin]:
    """The origin of the collectives of each level, and of the constants that they share."""
    origins = []
    for level in cluster.levels:
        if level.measured:
            kinds = ", ".join(sorted({m.kind for m in level.measured}))
            origins.append(Origin(f"{level.name}: {kinds}", "measured", "autopar profile"))
        else:
            origins.append(Origin(f"{level.name}: bandwidth, latency", "assumed", "cluster file"))
    shared = [c for c in constants().values() if "wire" in c.name or "collective" in c.name]
    return origins + [Origin(c.name, c.how, c.basis) for c in shared]


def family_origins(family: str) -> list[Origin]:
    """The origin of the constants of the transformer family on one family of devices."""
    families = {name.rsplit("_", 1)[-1] for name in fitted_table() if name.startswith("matmul_")}
    return [
        Origin(name, entry.how, entry.basis)
        for name, entry in fitted_table().items()
        if name.rsplit("_", 1)[-1] not in families - {family}
    ]


def summary(origins: list[Origin]) -> str:
    """`12 fitted, 5 measured, 3 assumed`."""
    counts = Counter(origin.how for origin in origins)
    return ", ".join(f"{n} {how}" for how, n in sorted(counts.items(), key=lambda e: -e[1]))
