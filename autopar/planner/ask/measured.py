"""What a profile measured of the devices of a cluster, and of the routes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.cost_models.calibrate import calibrate
from autopar.cost_models.measured_routes import measured_routes
from autopar.nouns.cluster import Cluster
from autopar.nouns.imbalance import Imbalance
from autopar.nouns.style import Style


@dataclass(frozen=True, slots=True)
class Measured:
    """A database of `autopar profile`, to be read on this machine: where it was measured with other
    ``libraries`` or on another ``processor``, ``warn`` says so."""

    profile: str
    libraries: str | None
    processor: str | None
    warn: Callable[[str], None]

    def cluster(self, cluster: Cluster, style: Style) -> Cluster:
        """The cluster with the times that the profile holds of its devices."""
        calibrated = calibrate(
            cluster, self.profile, self.libraries, self.warn, self.processor, style
        )
        device = calibrated.device
        if not (
            device.rates or device.fitted or any(level.measured for level in calibrated.levels)
        ):
            self.warn(
                f"no times of profile {self.profile} are used: it holds no measured ops or "
                "collectives, and its runs were of plans made with another profile or for another "
                "execution style; `autopar profile` measures into it"
            )
            return cluster
        return calibrated

    def routes(self, cluster: Cluster, model: str) -> Imbalance | None:
        """Of the model whose graph has this fingerprint, as its last run had it; None: not
        measured."""
        return measured_routes(self.profile, cluster.device.name, model)
