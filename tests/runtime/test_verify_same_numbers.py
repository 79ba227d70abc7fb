"""Sizes that come with the batch: a plan is verified by batches that have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many
from tests.plans import cluster_text

MODEL = """
from functools import partial

import autopar
from tests.emit.test_pieces_together import Model, _written, batch

workload = autopar.Workload(model=partial(Model, _written), batch=batch)
"""
LAYOUTS = ({"dp_shard": "2", "zero": "3", "microbatch": "2"}, {"tp": "2"})


@pytest.mark.gloo(2)
def test_they_stay_in_the_batch_that_is_drawn(tmp_path: Path) -> None:
    """A program would refuse others."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    folders = []
    for number, layout in enumerate(LAYOUTS):
        planned = plan(f"{model}:workload", str(cluster), layout)
        folders.append(tmp_path / f"plan_{number}")
        plan_folder.write(folders[-1], plan_files(planned, folders[-1])[0])
    assert [v.passed for v in verify_many(folders)] == [True, True]
