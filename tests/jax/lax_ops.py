"""Functions of JAX, and the calls of JAX's own records of ops, as models (`as_models`).

python -m tests.jax.lax_ops [--only NAME]... [--part 0/2] [--source NAME] [--programs 2]
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.quick_xla import compile_quickly
from tests.outcomes import Outcome, report

SOURCES = ("by hand", "public", "records")


def outcomes(
    sources: Sequence[str] = SOURCES,
    only: Sequence[str] = (),
    part: tuple[int, int] = (0, 1),
    programs: int = 0,
) -> Iterator[Outcome]:
    """``only``: what names begin by; ``programs``: under how many stages beside the capture."""
    from tests.jax.as_models import STAGES, tried
    from tests.jax.calls_by_hand import BY_HAND
    from tests.jax.lax_calls import by_hand, by_template, harnesses, of_harnesses, public

    known: dict[str, Any] = {
        "by hand": (lambda: BY_HAND, by_hand),
        "public": (public, by_template),
        "records": (harnesses, of_harnesses),
    }
    names = [(name, known[s][1]) for s in sources for name in known[s][0]()]
    for name, calls in names[part[0] :: part[1]]:
        if only and not name.startswith(tuple(only)):
            continue
        for call in calls(name):
            yield from tried(call, STAGES[:programs])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="what names begin by")
    parser.add_argument("--part", default="0/1", help="of all functions, as 0/2 and 1/2")
    parser.add_argument("--source", action="append", choices=SOURCES)
    parser.add_argument("--programs", type=int, default=0, help="under how many drawn stages")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    warnings.simplefilter("ignore")
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"  # many calls fail, and quickly
    kept = compile_quickly(os.environ, "--xla_force_host_platform_device_count=4")
    report(outcomes(given.source or SOURCES, given.only, (first, step), given.programs))
    del kept


if __name__ == "__main__":
    main()
