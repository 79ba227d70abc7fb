"""Less may be moved than was priced only by the bytes of equal gradients."""

from __future__ import annotations

import numpy as np

from autopar.lowering.collectives import Row
from autopar.runtime.verify.jax.merged import Twins, twins, without_merged

MESH = {"dp_shard": 2, "tp": 2}
ALIKE = [Twins("blocks.*.down.b", "blocks.*.out.b", 512), Twins("tail.b", "head.b", 96)]


def test_parameters_of_one_gradient_are_found_by_layer() -> None:
    draws = np.random.default_rng(0)
    one, two = draws.normal(size=(2, 32))
    gradients = {
        "blocks.0.out.b": one, "blocks.0.down.b": one * (1 + 1e-15),
        "blocks.1.out.b": two, "blocks.1.down.b": two,
        "blocks.1.up.b": two * (1 + 1e-9), "flat": two.reshape(4, 8),
        "unused": np.zeros(32), "unused too": np.zeros(32),
    }  # fmt: skip
    found = twins(gradients, dict.fromkeys(gradients, 4))
    assert found == [Twins("blocks.*.down.b", "blocks.*.out.b", 2 * 32 * 4)]


def missing(kind: str, size_bytes: int) -> tuple[list[str], tuple[str, ...]]:
    priced = [Row(kind, "tp", 4096, 2), Row("all_gather", "tp", 64, 1)]
    issued = [Row(kind, "tp", 8192 - size_bytes, 1), Row("all_gather", "tp", 64, 1)]
    return without_merged(priced, issued, ALIKE, MESH)


def test_what_is_missing_has_to_be_their_bytes() -> None:
    both = "blocks.*.down.b and blocks.*.out.b"
    assert missing("all_reduce", 0) == ([], ())
    for whole_or_share in (512, 256, 128):
        assert missing("all_reduce", whole_or_share) == ([], (both,))
    assert missing("reduce_scatter", 608) == ([], (both, "tail.b and head.b"))
    for other in (500, 1024, 64, -512):
        lines, pairs = missing("all_reduce", other)
        assert (len(lines), pairs) == (1, ())
    assert len(missing("all_to_all", 512)[0]) == 1
