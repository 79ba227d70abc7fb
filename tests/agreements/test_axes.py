"""Axes of a mesh are called by the names of `autopar.nouns.axes`, as constants."""

from __future__ import annotations

import ast

from autopar.nouns.axes import AXES
from tests.agreements.test_imports import ROOT, sources

MAY_SPELL = {
    "autopar/nouns/": "where the names are from",
    "autopar/files/imports/deepspeed.py": "a section of DeepSpeed's settings",
}


def test_names_of_axes_are_constants() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for _, file in sources()
        if not str(file.relative_to(ROOT)).startswith(tuple(MAY_SPELL))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in AXES
    ]
    assert not wrong, "\n".join(wrong)
