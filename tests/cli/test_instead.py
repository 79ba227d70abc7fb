"""A hint that names a layout has tried it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cli.instead import tried
from autopar.nouns.errors import DoesNotFit, UserError


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
