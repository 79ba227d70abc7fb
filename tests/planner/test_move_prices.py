"""Many pairs priced at once cost what `reshard` and `Prices` say of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.cost_models.compute import op_time_s
from autopar.files.cluster_file import load_cluster
from autopar.nouns.graph import Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.problem import FORBIDDEN
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Sharding, split
from autopar.planner.problem.codes import Codes
from autopar.planner.problem.move_prices import FEW, FEW_WAYS, MovePrices
from autopar.pricing.prices import Prices
from autopar.rules.reshard import reshard

CLUSTER = load_cluster("examples/clusters/h100_8x8.yaml")
PLACEMENTS = (WHOLE, DEFERRED, PARTIAL, split(0), split(1))


@pytest.mark.parametrize(
    ("differentiable", "handed"), [(True, False), (False, False), (True, True)]
)
@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (Mesh(("a", "b"), (8, 4)), (64, 128)),
        (Mesh(("a", "b"), (2, 3)), (5, 12)),
        (Mesh(("microbatch", "dp_shard", "a", "b"), (2, 2, 2, 4)), (32, 24)),
        (Mesh(("dp_shard", "a", "b"), (2, 2, 3)), (6, 18)),
    ],
    ids=str,
)
def test_tables_hold_the_prices_of_the_steps(
    mesh: Mesh, shape: tuple[int, ...], differentiable: bool, handed: bool
) -> None:
    tensor = Tensor("x", shape, "bfloat16", "activation", differentiable)
    codes, prices = Codes(mesh), Prices(CLUSTER, mesh, "bfloat16")
    data = {a: split(0) for a in mesh.axes if a in ("microbatch", "dp_shard")}
    free = [a for a in mesh.axes if a not in data]
    every = [
        Sharding.of([*data.items(), *zip(free, chosen, strict=True)])
        for chosen in itertools.product(PLACEMENTS, repeat=len(free))
    ]
    assert len(every) ** 2 > max(FEW, FEW_WAYS)
    table = MovePrices(codes, prices).between(
        tensor, codes.array(every), codes.array(every), differentiable, handed
    )
    for (i, source), (k, target) in itertools.product(enumerate(every), repeat=2):
        steps = reshard(source, target, shape, mesh, differentiable)
        expected = FORBIDDEN
        if steps is not None:
            expected = sum(prices.steps(steps, tensor, differentiable, handed))
        assert table[i, k] == expected, f"{source} to {target}"


def test_a_move_inside_a_kernel_pays_for_memory_too() -> None:
    mesh = Mesh(("a",), (8,))
    prices = Prices(CLUSTER, mesh, "bfloat16")
    tensor = Tensor("x", (64, 128), "bfloat16", "activation", True)
    steps = reshard(Sharding.parse("a:P"), Sharding(), tensor.shape, mesh, True)
    assert steps
    (alone, _), (within, _) = (prices.steps(steps, tensor, True, h) for h in (False, True))
    assert within - alone == pytest.approx(
        op_time_s(CLUSTER, 0.0, 2 * 64 * 128 * 2, "bfloat16", "elementwise") * 1e12, abs=1
    )
    nothing = reshard(Sharding(), Sharding(), tensor.shape, mesh, True)
    assert nothing == ()
    assert prices.steps(nothing, tensor, True, True) == (0, 0)


def test_repeated_shardings_have_their_rows() -> None:
    mesh = Mesh(("a", "b"), (2, 2))
    codes = Codes(mesh)
    moves = MovePrices(codes, Prices(CLUSTER, mesh, "float32"))
    tensor = Tensor("x", (8, 8), "float32", "activation", True)
    given = codes.array([Sharding.parse("a:P"), Sharding(), Sharding.parse("a:P")])
    table = moves.between(tensor, given, given[:2], True)
    assert table.shape == (3, 2)
    np.testing.assert_array_equal(table[0], table[2])
    assert table[0, 1] > table[0, 0] == 0


def test_codes_read_back() -> None:
    mesh = Mesh(("dp_shard", "a", "b"), (2, 2, 2))
    codes = Codes(mesh)
    for chosen in itertools.product((*PLACEMENTS, split(4)), repeat=3):
        sharding = Sharding.of(zip(mesh.axes, chosen, strict=True))
        assert codes.sharding(codes.of(sharding)) == sharding
        array = codes.array([sharding])
        np.testing.assert_array_equal(codes.pack(codes.digits(array)), array)
        model, batch = codes.model_part(array)[0], codes.batch_part(array)[0]
        assert codes.sharding(int(model)).on("dp_shard") == WHOLE
        assert codes.sharding(int(batch)) == Sharding.of([("dp_shard", chosen[0])])
