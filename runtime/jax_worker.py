"""What the process of a JAX job runs, started by `autopar.runtime.jax_launch`.

    python -m autopar.runtime.jax_worker run|verify '{"json": "options"}' <file for the result>

The result is ``{"result": ...}``, or `autopar.runtime.failures.report` of what it raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from autopar.errors import UserError
from autopar.runtime.failures import report


def main(job: str, options: dict[str, Any]) -> dict[str, Any]:
    """The job's result, or its error, as JSON-like values."""
    where = {"step": "before the first step", "plan": options.get("plan", "")}
    try:
        _check_platform()
        if job == "run":
            from autopar.runtime.jax_load import train

            return {"result": train(options, where)}
        from autopar.runtime.jax_verify import verify

        found = []
        for folder in options["plans"]:
            where.update(step=f"while verifying {folder}", plan=folder)
            found.append(verify(folder))
        return {"result": found}
    except Exception as error:  # of a user's function or of jax: the parent prints it
        return report(error, 0, where["step"], where["plan"])


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
