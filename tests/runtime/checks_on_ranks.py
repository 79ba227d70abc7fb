"""Checks that every process of a group runs, one after the other, as a script of torchrun."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def run_checks(checks: Callable[[], Mapping[str, Callable[[], object]]]) -> None:
    """Writes ``results.json`` into the folder that the command line names: by check ``right``, or
    what failed, behind which none is run. ``checks`` is called within the group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, object] = {}
    for name, check in checks().items():
        try:
            check()
            results[name] = "right"
        except Exception:  # whatever a check raises
            results[name] = {"failed": traceback.format_exc()}
            if dist.get_rank() != 0:
                raise
            break
    if dist.get_rank() == 0:
        Path(sys.argv[1], "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
