"""What the process of a JAX job runs, started by `autopar.runtime.jobs.jax_launch`.

    python -m autopar.runtime.jobs.jax_worker run|verify '{"json": "options"}' <file for the result>

The result is ``{"result": ...}``, or `autopar.runtime.jobs.failures.report` of what it raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.runtime.jobs.failures import report
from autopar.runtime.jobs.steps import take_steps

MEMORY_IS = (
    "arguments and temporaries of the compiled step on one device, as XLA counts them, without "
    "what the runtime holds"
)


def main(job: str, options: dict[str, Any]) -> dict[str, Any]:
    """The job's result, or its error, as JSON-like values."""
    where = {"step": "before the first step", "plan": options.get("plan", "")}
    try:
        _check_platform()
        if job == "run":
            return {"result": train(options, where)}
        from autopar.runtime.verify.jax.verify import verify

        results = []
        for folder in options["plans"]:
            where.update(step=f"while verifying {folder}", plan=folder)
            results.append(verify(folder))
        return {"result": results}
    except Exception as error:  # of a user's function or of jax: the parent prints it
        return report(error, 0, where["step"], where["plan"])


def train(options: dict[str, Any], where: dict[str, str]) -> dict[str, Any]:
    """``steps`` steps of ``plan``, printed; the fields of a `RunResult`."""
    from autopar.runtime.jax.load import load

    plan = plan_folder.read_plan(options["plan"])
    trainer = load(options["plan"])
    if options["resume"]:
        trainer.load(options["resume"])
    return {
        **take_steps(trainer, options, where, plan.prediction.step_time_s),
        "ranks": plan.device_count,
        "peak_memory_bytes": trainer.peak_memory_bytes,
        "memory_is": MEMORY_IS,
        "memory_compares": False,
    }


def _check_platform() -> None:
    """Raises `UserError` where jax has no device of the kind that was asked for."""
    import jax

    try:
        jax.devices()
    except Exception as error:  # of many kinds, by platform and version
        asked = os.environ.get("JAX_PLATFORMS", "auto")
        why = " ".join(str(error).split())
        raise UserError(
            f"device {asked}: jax finds none here{': ' if why else ''}{why}; use --device cpu, or "
            "install the jax of that device"
        ) from None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is told once, by who started this
    done = main(sys.argv[1], json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(done))
