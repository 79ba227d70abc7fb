"""A plan in its folder, as a script and a notebook hold it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from autopar.files import plan_folder
from autopar.nouns.plan import Plan
from autopar.report.units import degrees, duration, size


@dataclass(frozen=True, slots=True, repr=False)
class PlanFolder(os.PathLike[str]):
    """A plan that was written to ``folder``; takes the folder's place wherever one is given.

    ``repr`` is one line, ``str`` the summary that `autopar plan` prints, and a notebook shows the
    report.
    """

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def plan(self) -> Plan:
        """Every decision."""
        return plan_folder.read_plan(self.folder)

    def __repr__(self) -> str:
        plan = self.plan
        predicted, memory = plan.prediction, plan.prediction.memory_bytes
        least, most = predicted.time_band_s
        return (
            f"<plan of {plan.workload.rpartition('/')[2]} in {self.folder}: "
            f"{degrees(plan.degrees)}, ZeRO {plan.each('zero')}, microbatches {plan.microbatches}, "
            f"recompute {plan.each('recompute')}; {plan.device_count} devices; a step "
            f"{duration(predicted.step_time_s)} ({duration(least)} to {duration(most)}), "
            f"{size(memory.total)} of {size(memory.limit)}>"
        )

    def __str__(self) -> str:
        return (self.folder / plan_folder.REPORT).read_text()

    def _repr_html_(self) -> str:
        from autopar.report.page.page import fragment
        from autopar.report.page.shown import shown
        from autopar.report.revisit import open_folder

        return fragment(shown(open_folder(self.folder), plan_folder.read_collectives(self.folder)))
