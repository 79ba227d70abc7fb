"""A loss that is no number stops a run with what to try."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.nouns.workload import Workload
from autopar.runtime.shared.divergence import Diverged, check_loss

WORKLOAD = Workload(model=dict, batch=dict, learning_rate=3.0)


def test_numbers_go_on() -> None:
    check_loss([], 0, WORKLOAD)
    check_loss([2.0, 1e30], 1, WORKLOAD)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_after_others(loss: float) -> None:
    with pytest.raises(Diverged) as caught:
        check_loss([2.0, 1e30, loss], 7, WORKLOAD)
    text = str(caught.value)
    assert f"the loss of step 7 is {loss} after 1e+30 in step 6" in text
    assert "a learning_rate below 3, or clip_norm=1.0, or looking" in text


def test_only_what_would_change_something_is_named() -> None:
    clipped = replace(WORKLOAD, clip_norm=1.0, precision="float16")
    with pytest.raises(Diverged, match=r"step 0 is nan; .*Try precision='bfloat16', or looking"):
        check_loss([math.nan], 0, clipped)
