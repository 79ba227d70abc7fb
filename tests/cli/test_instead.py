"""A hint that names a layout has tried it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cli.instead import tried
from autopar.nouns.errors import DoesNotFit, UserError
from tests.cli.test_bad_input import Run, run  # noqa: F401

GROUPS = """
    import jax
    import jax.numpy as jnp
    import autopar

    def init(key):
        return {"w": jnp.zeros((32, 4, 4))}

    def loss(params, batch):
        made = jax.lax.conv_general_dilated(
            batch["x"], params["w"], (1,), "SAME", feature_group_count=4
        )
        return (made ** 2).mean()

    workload = autopar.Workload(loss=loss, init=init, batch=lambda: {"x": jnp.zeros((4, 16, 32))})
"""


def test_pins_beside_those_given_come_first() -> None:
    asked: list[Mapping[str, str]] = []

    def plan(pins: Mapping[str, str]) -> str:
        asked.append(pins)
        if "pp" in pins:
            raise DoesNotFit("too big")
        return "tp 1, 0.1 s a step"

    error = UserError("no", {"tp": "1"})
    assert str(error) == "no, or plan with --fix tp=1 (not tried)"
    made = tried(error, {"pp": "2", "tp": "4"}, plan)
    assert asked == [{"pp": "2", "tp": "1"}, {"tp": "1"}]
    assert str(made) == "no. --fix tp=1 plans: tp 1, 0.1 s a step"


def test_what_does_not_plan_either_is_said() -> None:
    def plan(pins: Mapping[str, str]) -> str:
        raise UserError("8 devices")

    made = tried(UserError("no", {"tp": "1"}), {"tp": "4"}, plan)
    assert str(made) == "no. --fix tp=1 was tried too: 8 devices"


def test_a_program_that_cannot_be_written_names_pins_that_were_planned(run: Run) -> None:  # noqa: F811
    words = ("plan", "model.py", "--cluster", "cluster.yaml", "--fix", "tp=2,dp_shard=2")
    code, said = run(*words, model=GROUPS)
    assert code == 2
    assert "splits the groups of the convolution" in said
    assert "--fix tp=1,dp_shard=2 plans: dp_replicate 2 x dp_shard 2" in said
    assert "not tried" not in said
