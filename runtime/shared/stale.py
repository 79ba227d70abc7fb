"""Whether a plan is still that of its model and of this tool."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from autopar.files import plan_folder
from autopar.nouns.batch import BatchEntry
from autopar.nouns.errors import UserError
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


def check_fingerprint(plan: Plan, fingerprint: str, changes: str = "") -> None:
    """Raises `StalePlan` where the model's fingerprint is another one now: ``fingerprint``, in
    words where it has none. ``changes``: what is known to differ."""
    if fingerprint != plan.fingerprints.model:
        named = f"{changes} (" if changes else ""
        raise StalePlan(
            f"{plan.workload} has changed since it was planned: {named}its fingerprint was "
            f"{plan.fingerprints.model} and is {fingerprint}{')' if named else ''}; plan it "
            "again with `autopar plan`"
        )


def changed_batch(folder: str | Path, now: Iterable[BatchEntry]) -> str:
    """Which entries of the batch are not those of the plan in ``folder``; empty: none."""
    if not (Path(folder) / plan_folder.BATCH).exists():
        return ""
    was = {e.name: f"{e.dtype} {list(e.shape)}" for e in plan_folder.read_batch(folder)}
    given = {e.name: f"{e.dtype} {list(e.shape)}" for e in now}
    return ", ".join(
        f"batch[{name!r}] is {given.get(name, 'missing')} and was {was.get(name, 'missing')}"
        for name in dict.fromkeys((*was, *given))
        if was.get(name) != given.get(name)
    )
