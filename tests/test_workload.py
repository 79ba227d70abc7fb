"""Figures of a workload that no training can use are refused where they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.workload import Workload, WorkloadError


def workload(**options: Any) -> Workload:
    return Workload(model=lambda: None, batch=dict, **options)


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload(**options)
    assert str(caught.value).startswith(said)


def test_the_ends_of_the_ranges() -> None:
    made = workload(learning_rate=0, weight_decay=0.0, betas=(0.0, 0.999), eps=1e-30, clip_norm=1)
    assert made.seed == 0
