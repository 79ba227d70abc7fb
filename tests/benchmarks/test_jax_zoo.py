"""The zoo of JAX models: what it lists, how plans are judged, and that it can tell a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.frontends.jax.capture import capture_workload
from benchmarks import jax_zoo, jax_zoo_gradients
from benchmarks.jax_zoo_models import FILES, INSTALL, kinds


def test_every_kind_names_where_its_form_is_published() -> None:
    every, missing = kinds()
    assert set(missing) <= {*INSTALL} == {*FILES} - {"jax"}
    assert len({kind.source for kind in every.values()}) > 20
    plain = [kind for kind in every.values() if kind.framework == "plain JAX"]
    assert len(plain) >= jax_zoo.KINDS_WANTED


@pytest.mark.parametrize("name", ["FNO", "graph attention", "PINN", "RealNVP"])
def test_a_kind_is_captured_from_the_file_that_its_plans_have(name: str) -> None:
    captured = capture_workload(kinds()[0][name].workload())
    assert captured.samples == 16


def test_models_that_compare_samples_keep_their_batch() -> None:
    every = kinds()[0]
    assert jax_zoo.layouts(every["CLIP"])["recompute"]["microbatch"] == "4"
    assert jax_zoo.layouts(every["VAE"])["recompute"]["microbatch"] == "2"


def test_a_kind_counts_by_the_worst_of_its_plans() -> None:
    right = dict.fromkeys(jax_zoo.LAYOUTS, "right")
    made = [right, {**right, "tp": "refused"}, {**right, "dp": "WRONG", "tp": "refused"}]
    assert [target.value for target in jax_zoo.targets(made)] == [1, 0, 2]


def test_gradients_that_are_off_in_one_leaf_are_far() -> None:
    draws = np.random.default_rng(0)
    theirs: dict[str, Any] = {"a": draws.normal(size=(8, 8)), "b": [draws.normal(size=3)]}
    ours = {"a": theirs["a"], "b": [theirs["b"][0] * (1 + 1e-7)]}
    assert jax_zoo_gradients.distance(theirs, theirs) == 0.0
    assert 0.9e-7 < jax_zoo_gradients.distance(ours, theirs) < 1.1e-7
    assert jax_zoo_gradients.distance({"a": theirs["a"]}, theirs) == float("inf")


def test_a_row_is_right_within_the_precision_that_it_names() -> None:
    row: dict[str, Any] = {"kind": "x", "precision": "float64", "dp": 1e-12, "tp": "refused"}
    assert jax_zoo_gradients.is_right(row)
    assert not jax_zoo_gradients.is_right({**row, "dp": 1e-8})
    assert jax_zoo_gradients.is_right({**row, "dp": 1e-8, "precision": "float32"})
    assert not jax_zoo_gradients.is_right({**row, "dp": None, "precision": "crashed"})


def test_gradients_of_a_plan_are_those_of_one_device() -> None:
    row = jax_zoo_gradients.in_process("RealNVP")
    assert row["precision"] == "float64"
    assert all(row[name] < 1e-13 for name in jax_zoo.LAYOUTS)


def test_a_plan_of_the_zoo_is_a_model_file(tmp_path: Path) -> None:
    kind = kinds()[0]["VAE"]
    assert "workload_of('VAE')" in jax_zoo.model_in(tmp_path / "m", kind).read_text()
