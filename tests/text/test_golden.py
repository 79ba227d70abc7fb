"""The texts of GPT, Llama, ResNet and T5 in both frameworks, against files that people read."""

from __future__ import annotations

import pytest

from autopar.nouns.text import graph as graph_text
from tests.text import golden, reading_lowered, reading_plans


@pytest.mark.parametrize("case", golden.CASES)
def test_the_texts_are_those_of_the_files(case: str) -> None:
    """Where a change is meant: ``python -m tests.text.golden``, and read the diff."""
    for name, text in golden.texts(case).items():
        assert text == (golden.FOLDER / name).read_text(), name


@pytest.mark.parametrize("case", golden.CASES)
def test_the_files_read_back(case: str) -> None:
    plan, lowered = golden.planned(case)
    files = {form: (golden.FOLDER / f"{case}.{form}.txt").read_text() for form in golden.FORMS}
    graph = graph_text.from_text(files["graph"])
    assert graph == golden.captured(case).graph
    assert list(graph.tensors) == list(golden.captured(case).graph.tensors)
    assert reading_plans.from_text(files["plan"]) == plan
    assert reading_lowered.from_text(files["lowered"]) == lowered


def test_there_are_no_other_files() -> None:
    made = {f"{case}.{form}.txt" for case in golden.CASES for form in golden.FORMS}
    assert {file.name for file in golden.FOLDER.iterdir()} == made
