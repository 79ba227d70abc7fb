"""A pass of numbers is played apart from one of arrays or with a note: to the same last digit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.pricing.streams import Streams, UnitTime

SECONDS = st.sampled_from([0.0, 1e-4, 3e-4, 1.1e-3, 0.7e-2])
UNITS = st.lists(st.builds(UnitTime, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1)


@given(UNITS, st.booleans(), st.booleans(), st.integers(0, 2), st.data())
def test_numbers_are_played_as_arrays_and_notes_are(
    units: list[UnitTime], gather: bool, hides: bool, ahead: int, data: st.DataObject
) -> None:
    each = st.lists(SECONDS, min_size=len(units), max_size=len(units))
    last = data.draw(st.none() | each)
    plain = Streams(units, gather, hides, ahead)
    noted = Streams(units, gather, hides, ahead, lambda *_: None)
    assert plain.computed_s == noted.computed_s
    assert plain.moved_s == noted.moved_s
    assert plain.done_s(last) == noted.done_s(last)
    several = [
        UnitTime(
            np.array([unit.forward_s, 2 * unit.forward_s]),  # type: ignore[arg-type]
            np.array([unit.backward_s, unit.backward_s]),  # type: ignore[arg-type]
            unit.gather_s,
            unit.regather_s,
            unit.reduce_s,
        )
        for unit in units
    ]
    done = np.atleast_1d(Streams(several, gather, hides, ahead).done_s(last))
    assert done[0] == plain.done_s(last)
