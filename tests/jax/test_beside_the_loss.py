"""How far what a loss function returns beside the loss is from what it should be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.runtime.verify.jax.errors import apart, errors
from autopar.runtime.verify.jax.record import Record
from autopar.runtime.verify.verified import TOLERANCE

WHOLE = np.array([1.0, -np.inf, np.nan, 2.0])


@pytest.mark.parametrize(
    "other",
    [
        np.array([1.0, 0.0, np.nan, 2.0]),
        np.array([1.0, np.inf, np.nan, 2.0]),
        np.array([1.0, -np.inf, 0.0, 2.0]),
        np.array([np.inf, -np.inf, np.nan, 2.0]),
        np.array(1.0),
        WHOLE[None],
    ],
)
def test_numbers_that_are_infinite_have_to_be_the_same(other: np.ndarray) -> None:
    assert apart(WHOLE, WHOLE) == 0
    assert apart(other, WHOLE) == math.inf


def test_complex_numbers_and_integers_count_whole() -> None:
    assert apart(np.array([1 + 2j]), np.array([1 + 5j])) == 3
    assert apart(np.array([True, False]), np.array([True, True])) == 1
    assert apart(np.array([2**31]), np.array([2**31 - 1])) == 1


@pytest.mark.parametrize("noise", [0.0, math.inf])
def test_what_is_wrong_beside_an_infinite_number_shows(noise: float) -> None:
    right = Record([1.0], [], [{"scores": WHOLE}], output_noise=[{"scores": noise}])
    wrong = Record([1.0], [], [{"scores": np.where(WHOLE == 1, 1.001, WHOLE)}])
    assert (errors(right, right).output, errors(right, right).worst_output) == (0.0, "scores")
    assert (errors(wrong, right).output or 0.0) > TOLERANCE
