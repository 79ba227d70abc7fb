"""A model that may be cut into stages, with what each of them costs; what is summed up is kept.

Stages of equal ops, as runs of as many blocks, are summed up once, wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.lowering.lowered import Lowered
from autopar.nouns.cluster import Cluster
from autopar.pricing.cuts import Cuts, Signature
from autopar.pricing.prices import Prices
from autopar.pricing.software_summary import held_of, summary_of
from autopar.pricing.summary import Summary, summarise
from autopar.pricing.units.held import StageBytes


@dataclass(slots=True)
class CutModel:
    """`Cuts` of a graph with the prices of its units; ``whole``: its summary, made where none is
    given.

    One may be had for every view of a cluster (`on`); they share what prices do not change.
    """

    cuts: Cuts
    whole: Summary | None
    prices: Prices
    framework: str
    _summaries: dict[Signature, Summary] = field(default_factory=dict)
    _held: dict[Signature, StageBytes] = field(default_factory=dict)
    _views: dict[Cluster, CutModel] = field(default_factory=dict)

    @property
    def lowered(self) -> Lowered:
        return self.cuts.lowered

    @property
    def units(self) -> tuple[str, ...]:
        return self.cuts.units

    @property
    def summary(self) -> Summary:
        if self.whole is None:
            self.whole = self._summarised(self.lowered, None)
        return self.whole

    def on(self, view: Cluster) -> CutModel:
        """The same on other devices, or with other links."""
        if view == self.prices.cluster:
            return self
        if view not in self._views:
            known = self.prices
            prices = Prices(
                view, known.mesh, known.precision, known.fusion, known.trainer, known.pieces
            )
            self._views[view] = CutModel(self.cuts, None, prices, self.framework)
        return self._views[view]

    def stage_summary(self, first: int, end: int) -> Summary:
        if (first, end) == (0, len(self.units)):
            return self.summary
        key = self.cuts.signature(first, end)
        if key not in self._summaries:
            part = self.cuts.part(first, end).lowered
            self._summaries[key] = self._summarised(part, self.summary)
        return self._summaries[key]

    def _summarised(self, part: Lowered, known: Summary | None) -> Summary:
        trainer = self.prices.trainer
        if trainer is None:
            return summarise(part, self.prices, self.framework, known)
        return summary_of(part, self.prices, trainer, known)

    def stage_held(self, first: int, end: int) -> StageBytes:
        """What published software holds of a stage."""
        key, trainer = self.cuts.signature(first, end), self.prices.trainer
        assert trainer is not None
        if key not in self._held:
            part, calls = self.cuts.part(first, end).lowered, self.cuts.calls(first, end)
            self._held[key] = held_of(part, self.prices, trainer, calls)
        return self._held[key]
