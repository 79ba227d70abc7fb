"""What the process of a JAX job runs, started by `autopar.runtime.jax_launch`.

    python -m autopar.runtime.jax_worker run|verify '{"json": "options"}' <file for the result>

The result is ``{"result": ...}``, or ``{"error": ..., "message": ..., ...}`` of what it raised.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from autopar.errors import UserError


def main(job: str, options: dict[str, Any]) -> dict[str, Any]:
    """The job's result, or its error, as JSON-like values."""
    try:
        if job == "run":
            from autopar.runtime.jax_load import train

            return {"result": train(options)}
        from autopar.runtime.jax_verify import verify

        return {"result": [verify(folder) for folder in options["plans"]]}
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "user": isinstance(error, UserError),
            "exit_code": getattr(error, "exit_code", 1),
            "traceback": traceback.format_exc(),
        }


if __name__ == "__main__":
    found = main(sys.argv[1], json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(found))
