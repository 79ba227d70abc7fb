"""Fits the constants of the transformer family to published step times.

Each constant has a prior (a physical guess and how sure it is); the fit minimises

    sum over configurations of w rho(log(predicted / measured))
        + sum over constants of (log(c / prior) / sigma)^2

with rho the soft-L1 loss and w equal for every source up to a cap, so that a large table does not
drown a small one. Nothing in here knows which source a constant serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.cost_models.rates import rates_of
from autopar.cost_models.step_time import Rates, step_time
from autopar.cost_models.work import Work, stacked
from autopar.planner.family.layouts import work_for
from benchmarks.published_priors import priors
from benchmarks.published_rows import Run

Array = NDArray[np.float64]

STEP = 1e-6
"""Change of a constant's logarithm by which slopes are taken."""


class Fit:
    """Step times of many runs as one array function of the constants."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.work = stacked([run_work(run) for run in self.runs])
        self.measured = np.array([run.measured_s for run in self.runs], float)
        counts = Counter(run.source for run in self.runs)
        self.weights = np.array([min(1.0, (12 / counts[r.source]) ** 0.5) for r in self.runs])
        self.names = list(priors())
        self.prior = np.log([priors()[name][0] for name in self.names])
        self.sigma = np.array([priors()[name][1] for name in self.names])
        self.styles = [(r.cluster.device, r.precision, r.software, r.arch.dim) for r in self.runs]
        self.distinct = sorted(set(self.styles), key=str)
        self.which = np.array([self.distinct.index(style) for style in self.styles], int)

    def predict(self, log_constants: Array) -> Array:
        """Step seconds of every run: [runs] of one set of constants, [sets, runs] of several."""
        sets = [
            dict(zip(self.names, one, strict=True))
            for one in np.exp(np.atleast_2d(log_constants)).tolist()
        ]
        rows = [[rates_of(*style, constants=one) for style in self.distinct] for one in sets]
        rates = Rates(
            **{
                f.name: np.array([[getattr(r, f.name) for r in row] for row in rows])[:, self.which]
                for f in fields(Rates)
            }
        )
        predicted = np.asarray(step_time(self.work, rates).total_s)
        return predicted if log_constants.ndim == 2 else predicted[0]

    def solve(self, keep: NDArray[np.bool_], start: Array | None = None) -> Array:
        """Logarithms of the constants that fit the runs of `keep` best."""

        def residuals(x: Array) -> Array:
            errors = np.log(self.predict(x) / self.measured) / 0.06
            errors = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
            weighted = (errors * self.weights)[..., keep]
            return np.concatenate([weighted, (x - self.prior) / self.sigma], axis=-1)

        def slopes(x: Array) -> Array:
            """Differences of all constants at once: a pipeline is played for many costs as fast
            as for few."""
            moved = residuals(np.vstack([x, x + STEP * np.eye(len(x))]))
            return np.asarray((moved[1:] - moved[0]).T / STEP)

        first = self.prior if start is None else start
        rounds = 30 if start is None else 12
        optimum = least_squares(residuals, first, slopes, max_nfev=rounds, ftol=1e-4, xtol=1e-4)
        return np.asarray(optimum.x)

    def left_out(
        self, label: Callable[[Run], str], start: Array, progress: Callable[[str], None]
    ) -> dict[str, Array]:
        """The constants fitted without the runs of each label."""
        labels = np.array([label(run) for run in self.runs])
        by_group = {}
        for one in sorted(set(labels.tolist())):
            by_group[one] = self.solve(labels != one, start)
            progress(one)
        return by_group

    def predict_left_out(
        self, label: Callable[[Run], str], constants: Mapping[str, Array]
    ) -> Array:
        """Predictions of every run by the constants fitted without its label."""
        labels = np.array([label(run) for run in self.runs])
        predicted = np.zeros(len(self.runs))
        for one in set(labels.tolist()):
            out = labels == one
            predicted[out] = self.predict(constants[one])[out]
        return predicted

    def constants(self, log_constants: Array) -> Mapping[str, float]:
        return dict(zip(self.names, np.exp(log_constants).tolist(), strict=True))


def run_work(run: Run) -> Work:
    """The work of one published run."""
    return work_for(run.arch, run.cluster, run.layout, run.software, run.precision)


def source_of(run: Run) -> str:
    """The label of `left_out` that leaves whole sources out."""
    return run.source


def one_per_configuration(runs: Sequence[Run]) -> list[Run]:
    """The run of the latest software for each configuration (the middle one where equal)."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    chosen = []
    for same in groups.values():
        latest = max(run.order for run in same)
        last = sorted((r for r in same if r.order == latest), key=lambda r: r.measured_s or 0.0)
        chosen.append(last[len(last) // 2])
    return chosen
