"""Over whole slices of TPUs programs scatter in two: one would be compiled as an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.slices import find_slice
from autopar.files.plan_checks import BadPlan, from_json
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.plan import to_json
from autopar.runtime.jax.parallel import gather, make_mesh, reduce_scatter, scatter
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

CUBE = find_slice("v5p-2x2x2")
CLUSTER = Cluster("v5p", (DeviceGroup(find_device("TPU-v5p"), 8),), CUBE.levels())
TWO = ("dp_shard/first", "dp_shard/then")


@pytest.mark.parametrize(
    ("fix", "moved"),
    [
        ({"dp_shard": "8", "zero": "3"}, TWO),
        ({"dp_shard": "8", "zero": "2"}, TWO),
        ({"dp_shard": "8", "zero": "1"}, TWO),
        ({"dp_shard": "4", "cp": "2", "zero": "3"}, ("dp_shard", "cp")),
        ({"dp_shard": "4", "cp": "2", "zero": "1"}, ("dp_shard", "cp")),
        ({"dp_shard": "4", "tp": "2", "zero": "3"}, ("dp_shard", "tp")),
    ],
    ids=str,
)
def test_a_step_is_exact_and_moves_what_is_priced(
    fix: dict[str, str], moved: Sequence[str]
) -> None:
    program = made_of("scatters", models.MODELS["gpt_scan"](), fix, devices=CLUSTER)
    exact, issued = program.exact()
    assert exact.largest < TOLERANCE
    assert differences(program.priced_in_float64(), issued) == []
    assert {row.axis for row in program.priced() if row.kind == "reduce_scatter"} == set(moved)


def test_the_program_says_so_and_a_plan_that_cannot_is_refused() -> None:
    fix = {"dp_shard": "8", "zero": "1"}
    program = made_of("scatters", models.MODELS["gpt_scan"](), fix, devices=CLUSTER)
    assert 'scatters={"dp_shard": 4}' in program.text
    assert 'first=turns_of(scatters, "dp_shard")' in program.files["train.py"]
    text = to_json(program.plan)
    assert from_json(text) == program.plan
    for wrong, why in (("3", "some ranks of that axis that divide"), ("1", "2 of its ranks")):
        with pytest.raises(BadPlan, match=why):
            from_json(text.replace('"dp_shard": 4', f'"dp_shard": {wrong}'))


@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("order", ["", "zigzag"])
def test_two_are_as_one(first: int, order: str) -> None:
    mesh = make_mesh(tp=8)
    x = jax.random.normal(jax.random.key(0), (8, 32, 3))

    def on_pieces(function: Any, given: Any, made: Any) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)

    def both(x: Any) -> tuple[Any, Any]:
        one = scatter(x[0], 0, "tp", order)
        return one, reduce_scatter(x[0], 0, "tp", order, first=first)

    one, two = on_pieces(both, (P("tp"),), (P("tp"), P("tp")))(x)
    assert jnp.allclose(one, two, atol=1e-5)

    def gradient(x: Any, first: int) -> Any:
        def loss(x: Any) -> Any:
            whole = gather(x, 0, "tp", "reduce_scatter", order, first=first)
            return (whole * jnp.arange(whole.size).reshape(whole.shape)).sum()

        return jax.grad(loss)(x)

    rows = x.reshape(256, 3)
    wanted, got = (
        on_pieces(lambda x, n=n: gradient(x, n), P("tp"), P("tp"))(rows) for n in (0, first)
    )
    assert jnp.allclose(wanted, got)
