"""A library's warning is shown once, by rank 0; a user's own by whoever has it."""

from __future__ import annotations

import logging
import sysconfig
import warnings
from pathlib import Path

import pytest

from autopar.runtime.jobs.library_warnings import once_from_rank_0

LIBRARY = str(Path(sysconfig.get_paths()["purelib"]) / "torch" / "autograd" / "graph.py")


@pytest.mark.parametrize(
    ("rank", "shown"),
    [(0, ["strides differ", "views", "mine", "mine"]), (1, ["mine", "mine"])],
)
def test_what_libraries_warn_of_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, rank: int, shown: list[str]
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: warned.append(str(message)))
    monkeypatch.setattr(logging.getLogger("torch"), "level", logging.WARNING)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        once_from_rank_0(rank)
        for text in ("strides differ", "views", "strides differ"):
            warnings.warn_explicit(text, UserWarning, LIBRARY, 7)
        for _ in range(2):
            warnings.warn_explicit("mine", UserWarning, "model.py", 7)
    assert warned == shown
