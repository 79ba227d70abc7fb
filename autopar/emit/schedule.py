"""``schedule.txt`` beside a program of several stages: what each pipeline rank does, in order.

`autopar run`, `autopar verify` and ``train.py`` play what stands there, and `--fix schedule=` takes
such a file.
"""

from __future__ import annotations

from autopar.nouns.plan import Plan
from autopar.pipeline.actions import to_text
from autopar.pipeline.schedules.of_plan import schedule_of

FILE = "schedule.txt"
_KINDS = {
    "F": "F is its forward",
    "B": "B its backward",
    "I": "I the gradient of its inputs",
    "W": "W that of its weights",
}


def schedule_file(plan: Plan) -> str:
    """The file: a line a rank, in the order of ``pp``."""
    lists = schedule_of(plan).lists
    kinds = {action.kind for actions in lists for action in actions}
    spelled = ", ".join(text for kind, text in _KINDS.items() if kind in kinds)
    return (
        f"# {plan.schedule}: what each pipeline rank does in turn, a line a rank. An action is a\n"
        f"# stage's number, what it does, with which microbatch; {spelled}.\n"
        f"{to_text(lists)}\n"
    )
