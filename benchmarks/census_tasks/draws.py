"""Draws of a batch of the census, each with all samples in its first dim."""

from __future__ import annotations

from typing import Any

from benchmarks.census_configs import FIRST_SPECIAL, LENGTH

BATCH = 8
CLASSES = 6
PIXELS = 32


class Draws:
    """What a batch is drawn by, from one seed."""

    def __init__(self) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(0)

    def whole(self, top: int, *shape: int, low: int = 0) -> Any:
        """Whole numbers from ``low``, below ``top``."""
        import torch

        return torch.randint(low, top, (BATCH, *shape), generator=self._generator)

    def normal(self, *shape: int) -> Any:
        import torch

        return torch.randn(BATCH, *shape, generator=self._generator)

    def even(self, *shape: int) -> Any:
        """Between 0 and 1."""
        import torch

        return torch.rand(BATCH, *shape, generator=self._generator)

    def tokens(self, *shape: int, top: int = FIRST_SPECIAL) -> Any:
        """Tokens of a text, none of them special."""
        return self.whole(top, *(shape or (LENGTH,)), low=3)

    def answers(self, *shape: int) -> Any:
        """Labels of tokens, of which some do not count: unequal numbers over the ranks."""
        drawn = self.tokens(*shape)
        drawn[:, :2] = -100
        drawn[0, :9] = -100
        return drawn

    def classes(self, *shape: int, count: int = CLASSES) -> Any:
        return self.whole(count, *shape)

    def pixels(self, size: int = PIXELS) -> Any:
        return self.normal(3, size, size)

    def boxes(self) -> Any:
        """One box of a page for each token: its corners in whole numbers."""
        import torch

        corner = self.whole(20, 1, 1, low=3)
        return torch.arange(4).repeat(BATCH, LENGTH, 1) + corner

    def ones(self, *shape: int) -> Any:
        import torch

        return torch.ones(BATCH, *(shape or (LENGTH,)), dtype=torch.long)

    def alike(self, values: Any) -> Any:
        """The same values for every sample."""
        import torch

        given = torch.as_tensor(values)
        return given.repeat(BATCH, *(1 for _ in given.shape))
