"""Source lines written so that they say the same on every machine and in every checkout."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import replace
from pathlib import Path

from autopar.nouns.graph import Graph, Source, with_ops


def relative_sources(graph: Graph, home: Path) -> Graph:
    """``graph`` with the files of its sources relative to ``home``, the workload file's folder.

    A file of an installed library is named from where libraries lie, ``torch/nn/functional.py``.
    """
    names: dict[str, str] = {}

    def moved(source: Source) -> Source:
        if source.file not in names:
            names[source.file] = _relative(source.file, home)
        return replace(source, file=names[source.file])

    return with_ops(graph, lambda part, op: replace(op, source=moved(op.source)))


def _relative(file: str, home: Path) -> str:
    if not os.path.isabs(file):  # no file, or the name of text that was compiled
        return file
    paths = sysconfig.get_paths()
    for library in (paths["purelib"], paths["platlib"], paths["stdlib"]):
        if Path(file).is_relative_to(library):
            return Path(file).relative_to(library).as_posix()
    return Path(os.path.relpath(file, home)).as_posix()
