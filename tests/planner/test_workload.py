"""Figures of a workload that no training can use are refused where they are written."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.nouns.workload import Workload, WorkloadError, parallelize


def workload(**options: Any) -> Workload:
    return Workload(model=lambda: None, batch=dict, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"learning_rate": -1e-3}, "learning_rate=-0.001: give a number, 0 or more"),
        ({"learning_rate": math.nan}, "learning_rate=nan: give a number, 0 or more"),
        ({"learning_rate": math.inf}, "learning_rate=inf: give a number, 0 or more"),
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3': give a number"),
        ({"learning_rate": True}, "learning_rate=True: give a number"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: give a number, 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas[1]=1.0: give a number, 0 or more and below 1"),
        ({"betas": (-0.1, 0.9)}, r"betas[0]=-0.1: give a number, 0 or more and below 1"),
        ({"betas": (0.9,)}, "betas=(0.9,): give two numbers"),
        ({"betas": 0.9}, "betas=0.9: give two numbers"),
        ({"eps": 0.0}, "eps=0.0: give a number, more than 0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: give a number, more than 0, or None"),
        ({"clip_norm": -1}, "clip_norm=-1: give a number, more than 0, or None"),
        ({"seed": -1}, "seed=-1: give a whole number, 0 or more"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
    ],
)
def test_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload(**options)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr": 1e-3}, "lr=...: a Workload has no such argument. Did you mean learning_rate? "),
        ({"optimiser": "sgd"}, "optimiser=...: a Workload has no such argument. Did you mean opt"),
        ({"zzz": 1}, "zzz=...: a Workload has no such argument. There are batch, model, loss, "),
    ],
)
def test_arguments_that_there_are_not(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload(**options)
    assert str(caught.value).startswith(expected)
    with pytest.raises(WorkloadError) as decorated:
        parallelize(batch=dict, **options)(type("Model", (), {}))
    assert str(decorated.value) == str(caught.value)


def test_a_workload_without_a_batch_or_without_names() -> None:
    with pytest.raises(WorkloadError, match=r"needs batch=\.\.\."):
        Workload(model=lambda: None)  # type: ignore[call-arg]
    positional: Any = Workload
    with pytest.raises(WorkloadError, match="by name"):
        positional(dict, dict)


def test_a_workload_is_copied_and_shown_as_any_record() -> None:
    made = workload(seed=3)
    assert copy.deepcopy(replace(made, seed=4)).seed == 4
    assert "learning_rate" in inspect.signature(Workload).parameters


def test_the_ends_of_the_ranges() -> None:
    made = workload(learning_rate=0, weight_decay=0.0, betas=(0.0, 0.999), eps=1e-30, clip_norm=1)
    assert made.seed == 0


def test_a_loss_function_is_no_class_to_mark() -> None:
    mark: Any = parallelize(batch=dict)
    with pytest.raises(WorkloadError, match=r"is a function\..*Workload\(loss="):
        mark(lambda params, batch: 0.0)
