"""The census: what it is made of, and one type from its config to a written program."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from benchmarks import census
from benchmarks.census_tasks.draws import BATCH, Draws
from benchmarks.census_tasks.every import ENTRIES
from benchmarks.census_types import OTHERS


def test_every_type_is_named_once() -> None:
    names = census.names(None)
    assert len(set(names)) == len(names)
    assert not any(" " in name for name in names)
    assert {f"{task}/{model}" for task, models in OTHERS.items() for model in models} <= {*names}


def test_every_entry_names_a_model_of_the_library() -> None:
    assert [e.model for e in ENTRIES.values() if not hasattr(transformers, e.model)] == []


@pytest.mark.parametrize(
    "name",
    [
        "TimeSeriesPrediction/patchtst",
        "DocumentQuestionAnswering/layoutlm",
        "Contrastive/siglip",
        "ImageTextToText/llava_next",
    ],
)
def test_a_batch_has_a_sample_in_every_row_and_is_drawn_alike(name: str) -> None:
    workload = ENTRIES[name].workload()
    first, again = workload.batch(), workload.batch()
    assert {tensor.shape[0] for tensor in first.values()} == {BATCH}
    assert all(tensor.equal(again[entry]) for entry, tensor in first.items())


def test_labels_are_of_unequal_numbers() -> None:
    counts = (Draws().answers() != -100).sum(1)
    assert counts[0] < counts[1]


def test_an_entry_is_planned_and_one_that_needs_more_is_not_built(tmp_path: Path) -> None:
    row = census.plan_type("TimeSeriesPreTraining/patchtsmixer", tmp_path, seed=0)
    assert (row.outcome, row.task) == ("planned", "TimeSeriesPreTraining")
    assert all((Path(folder) / "program" / "model.py").is_file() for folder in row.folders)
    row = census.plan_type("Seq2SeqLM/switch_transformers", tmp_path, seed=0)
    assert row.outcome == "refused"
