"""Whether a plan is still that of its model and of this tool."""

from __future__ import annotations

from importlib.metadata import version

from autopar.errors import UserError
from autopar.nouns.plan import Plan


class StalePlan(UserError):
    """The model or the tool has changed since the plan was made."""


def check_tool(plan: Plan) -> None:
    """Raises `StalePlan` for a plan that another version made."""
    own = version("autopar")
    if plan.fingerprints.tool != own:
        raise StalePlan(
            f"the plan was made by autopar {plan.fingerprints.tool}, this is {own}; "
            f"plan {plan.workload} again with `autopar plan`"
        )


def check_fingerprint(plan: Plan, found: str) -> None:
    """Raises `StalePlan` where the model's fingerprint is another one now: ``found``, in words
    where it has none."""
    if found != plan.fingerprints.model:
        raise StalePlan(
            f"{plan.workload} has changed since it was planned: its fingerprint was "
            f"{plan.fingerprints.model} and is {found}; plan it again with `autopar plan`"
        )
