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

import numpy as np
from numpy.typing import NDArray

from autopar.planner.family.runs import step_of
from benchmarks.published_priors import priors
from benchmarks.published_rows import Run

Array = NDArray[np.float64]

STEP = 1e-6
"""Change of a constant's logarithm by which slopes are taken."""
ROUNDS, ENOUGH, MOST_DAMPED = 30, 1e-4, 1e2
"""Steps of a fit at most; the share of what it minimises below which a step is its last, as is one
that is so damped."""


class Fit:
    """Step times of many runs as one array function of the constants."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.measured = np.array([run.measured_s for run in self.runs], float)
        counts = Counter(run.source for run in self.runs)
        self.weights = np.array([min(1.0, (12 / counts[r.source]) ** 0.5) for r in self.runs])
        self.names = list(priors())
        self.prior = np.log([priors()[name][0] for name in self.names])
        self.sigma = np.array([priors()[name][1] for name in self.names])

    def predict(self, log_constants: Array) -> Array:
        """Step seconds of every run: [runs] of one set of constants, [sets, runs] of several."""
        sets = np.exp(np.atleast_2d(log_constants))
        constants = dict(zip(self.names, sets.T, strict=True))
        predicted = np.empty((len(sets), len(self.runs)))
        for i, run in enumerate(self.runs):
            predicted[:, i] = step_of(run.priced, constants).total_s
        return predicted if log_constants.ndim == 2 else np.asarray(predicted[0])

    def solve(self, keep: NDArray[np.bool_], start: Array | None = None) -> Array:
        """Logarithms of the constants that fit the runs of `keep` best."""
        every = self._solve(keep[None], self.prior if start is None else start, _silent)
        return np.asarray(every[0])

    def left_out(
        self, label: Callable[[Run], str], start: Array, progress: Callable[[str], None]
    ) -> dict[str, Array]:
        """The constants fitted without the runs of each label."""
        labels = np.array([label(run) for run in self.runs])
        names = sorted(set(labels.tolist()))
        keeps = np.array([labels != one for one in names])
        return dict(zip(names, self._solve(keeps, start, progress), strict=True))

    def _solve(
        self, keeps: NDArray[np.bool_], start: Array, progress: Callable[[str], None]
    ) -> Array:
        """[fits, constants] of the runs that each row of ``keeps`` [fits, runs] has.

        All fits take their steps together (Levenberg 1944, Marquardt 1963): a run is priced for
        many sets of constants as fast as for few. A step that does not help is taken back.
        """
        fits, n = len(keeps), len(self.names)
        at: Array = np.tile(start, (fits, 1))
        damping = np.full(fits, 1e-3)
        best = np.full(fits, np.inf)
        settled, tried = np.zeros(fits, bool), at
        system: tuple[Array, Array] = np.zeros((fits, n, n)), np.zeros((fits, n))
        for number in range(ROUNDS):
            errors, slopes = self._residuals(tried)
            prior = (tried - self.prior) / self.sigma
            costs = ((errors * keeps) ** 2).sum(axis=1) + (prior**2).sum(axis=1)
            better = costs < best
            progress(f"round {number}: {better.sum()} of {fits} fits go on")
            for fit in np.flatnonzero(better):
                j = slopes[fit][:, keeps[fit]]
                system[0][fit] = j @ j.T + np.diag(1 / self.sigma**2)
                system[1][fit] = j @ errors[fit, keeps[fit]] + prior[fit] / self.sigma
            settled |= better & (best - costs < ENOUGH * costs) | (damping > MOST_DAMPED)
            at[better], best[better] = tried[better], costs[better]
            damping = np.where(better, damping / 5, damping * 10)
            if settled.all():
                break
            scale = damping[:, None] * np.diagonal(system[0], axis1=1, axis2=2)
            damped = system[0] + np.eye(n) * scale[:, None]
            step = np.linalg.solve(damped, system[1][..., None])[..., 0]
            tried = np.where(settled[:, None], at, at - step)
        return at

    def _residuals(self, at: Array) -> tuple[Array, Array]:
        """Of [fits, constants] the weighted errors [fits, runs] under the soft-L1 loss, and their
        slopes [fits, constants, runs]."""
        fits, n = at.shape
        moved = at[:, None] + STEP * np.vstack([np.zeros(n), np.eye(n)])
        predicted = self.predict(moved.reshape(-1, n)).reshape(fits, n + 1, -1)
        errors = np.log(predicted / self.measured) / 0.06
        errors = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1)) * self.weights
        return errors[:, 0], (errors[:, 1:] - errors[:, :1]) / STEP

    def predict_left_out(
        self, label: Callable[[Run], str], constants: Mapping[str, Array]
    ) -> Array:
        """Predictions of every run by the constants fitted without its label."""
        names = list(constants)
        every = self.predict(np.array([constants[name] for name in names]))
        rows = [names.index(label(run)) for run in self.runs]
        return np.asarray(every[rows, np.arange(len(self.runs))])

    def constants(self, log_constants: Array) -> Mapping[str, float]:
        return dict(zip(self.names, np.exp(log_constants).tolist(), strict=True))


def _silent(_: str) -> None:
    """Nobody waits for one fit."""


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
