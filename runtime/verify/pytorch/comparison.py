"""What a program computed on its ranks beside what the reference did, as the largest errors."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

import torch

from autopar.runtime.pytorch.parameters import Region
from autopar.runtime.verify.pytorch.reference import Reference
from autopar.runtime.verify.verified import (
    NEGLIGIBLE,
    SMALLEST,
    TOLERANCE,
    Errors,
    gradient_scale,
    rounding_of,
    weight_scale,
)

UNHELD = "num_batches_tracked"
"""The counter of a batch norm, which programs are without where no op computes with it."""
Piece = tuple[str, Region, torch.Tensor]


class Comparison:
    """Collects the largest errors; without a reference (ranks other than 0) nothing.

    precision: of the run; ``tolerance``: what its errors are held against.
    """

    def __init__(
        self,
        wanted: Reference | None,
        precision: str = "float64",
        tolerance: float = TOLERANCE,
    ) -> None:
        self._wanted = wanted
        self._precision = precision
        self._tolerance = tolerance
        self._share = NEGLIGIBLE if precision == "float64" else rounding_of(precision)
        self._loss = 0.0
        self._gradient = (0.0, "")
        self._weight = (0.0, "")
        self._evaluation: tuple[float | None, str] = (None, "")

    def loss(self, step: int, value: float) -> None:
        if self._wanted is not None:
            right = self._wanted.losses[step]
            error = abs(value - right) / max(abs(right), SMALLEST)
            self._loss = max(self._loss, error if math.isfinite(value) else math.inf)

    def gradients(self, step: int, pieces: list[Piece]) -> None:
        if self._wanted is None:
            return
        whole = self._wanted.gradients[step]
        everything = self._wanted.gradients_norm(step)
        noise = self._wanted.noise[step] if self._precision == "float64" else {}
        errors = _errors(pieces, whole, self._wanted.alias, whole)
        for name, (error, note) in errors.items():
            norm = float(whole[name].norm()) if name in whole else 0.0
            scale = gradient_scale(norm, everything, self._share, noise.get(name, 0.0))
            self._gradient = max(self._gradient, (error / scale, _at(name, note)))

    def weights(self, pieces: list[Piece]) -> None:
        """Parameters and buffers after the last step, which took the reference's gradients."""
        if self._wanted is None:
            return
        whole = self._wanted.weights | self._wanted.whole
        needed = self._wanted.updated.union(self._wanted.gradients[0]) - {
            name for name in self._wanted.updated if name.rpartition(".")[2] == UNHELD
        }
        everything = self._wanted.weights_norm()
        for name, (error, note) in _errors(pieces, whole, self._wanted.alias, needed).items():
            norm = float(whole[name].norm()) if name in whole else 0.0
            moved = self._wanted.moved.get(name)
            if moved is None:
                scale = max(everything if norm < self._share * everything else norm, SMALLEST)
            else:
                scale = weight_scale(norm, moved, self._precision, self._tolerance)
            self._weight = max(self._weight, (error / scale, _at(name, note)))

    def evaluation(self, value: float, changed: Sequence[str]) -> None:
        """The loss that the program evaluates to after the last step, and buffers that this has
        changed."""
        if self._wanted is None or self._wanted.evaluation is None:
            return
        right = self._wanted.evaluation.loss
        error = abs(value - right) / max(abs(right), SMALLEST)
        whole = math.isfinite(value) and not changed
        self._evaluation = (error if whole else math.inf, ", ".join(changed))

    def errors(self) -> Errors:
        return Errors(
            self._loss,
            self._gradient[0],
            self._weight[0],
            self._gradient[1],
            self._weight[1],
            evaluation=self._evaluation[0],
            worst_evaluation=self._evaluation[1],
        )


def _errors(
    pieces: list[Piece],
    whole: Mapping[str, torch.Tensor],
    alias: Mapping[str, str],
    needed: Container[str],
) -> dict[str, tuple[float, str]]:
    """Norm of the difference by name, and a note; infinite where pieces do not make the whole.

    What is not ``needed`` may be missing: programs leave out tensors that the loss never reads.
    """
    squares: dict[str, float] = {}
    count: dict[str, int] = {}
    seen: dict[str, torch.Tensor] = {}
    notes: dict[str, str] = {}
    for given, region, piece in pieces:
        name = alias.get(given, given)
        if name not in whole:
            notes[given] = "the model has none"
            continue
        right = whole[name][region]
        if right.shape != piece.shape:
            notes[name] = f"a rank holds {list(piece.shape)} for {list(right.shape)}"
            continue
        error = float((piece - right.cpu()).square().sum())
        squares[name] = squares.get(name, 0.0) + (error if math.isfinite(error) else math.inf)
        count[name] = count.get(name, 0) + piece.numel()
        seen.setdefault(name, torch.zeros(whole[name].shape, dtype=torch.bool))[region] = True
    for name, right in whole.items():
        held, numel = int(seen[name].sum()) if name in seen else 0, right.numel()
        if (held or name in needed) and held < numel:
            notes.setdefault(name, f"the ranks hold {held} of {numel} elements")
        elif count.get(name, 0) % max(numel, 1):
            notes.setdefault(
                name, f"the ranks hold {count[name]} elements, of {numel} each as often"
            )
    # a piece that n ranks hold was counted n times
    copies = {name: count[name] / max(whole[name].numel(), 1) for name in squares}
    errors = {n: (math.sqrt(square / max(copies[n], 1)), "") for n, square in squares.items()}
    return errors | {name: (math.inf, note) for name, note in notes.items()}


def _at(name: str, note: str) -> str:
    return f"{name} ({note})" if note else name
