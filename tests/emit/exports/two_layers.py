"""The Llama example with two of its four layers: more are only more of the same."""

from __future__ import annotations

import runpy
from pathlib import Path

_example = runpy.run_path(str(Path(__file__).parents[3] / "examples/03_llama.py"))
_example["CONFIG"].num_hidden_layers = 2
workload = _example["workload"]
