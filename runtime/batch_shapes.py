"""The global batch of a run beside the one that was planned for, in either framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import UserError


class OtherBatch(UserError):
    """A global batch that is not of the shapes that were planned for."""


def check_shapes(batch: Mapping[str, Any], planned: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `OtherBatch` unless ``batch`` has the entries and global shapes of ``planned``.

    Predictions, local shapes and the cut into microbatches hold for these alone.
    """
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in batch.items()}
    wrong = [name for name in (*planned, *shapes) if shapes.get(name) != planned.get(name)]
    if wrong:

        def shown(found: Mapping[str, tuple[int, ...]]) -> str:
            return f"is {list(found[wrong[0]])}" if wrong[0] in found else "is missing"

        raise OtherBatch(
            f"batch[{wrong[0]!r}] {shown(shapes)}; where the plan was made it {shown(planned)}: "
            "give the global batch that was planned for, or plan again for this one"
        )
