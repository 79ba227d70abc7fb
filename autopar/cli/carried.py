"""What a JAX program carries so that ``python program/train.py`` needs no autopar.

``workload/``      the workload's file and what it imports of the user's own, as they are now, with
                   a stub for autopar, which they import to say what is trained
``constants.npz``  arrays that the loss closes over
``draws.bin``      what makes a step's random numbers from its keys, as `jax.export` has it
"""

from __future__ import annotations

import ast
import io
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.files.plan_folder import WORKLOAD
from autopar.frontends.shared.reachable import is_users
from autopar.nouns.workload import Workload

if TYPE_CHECKING:
    from autopar.frontends.shared.captured import Captured

_DEFAULTS = "\n".join(
    f"    {field.name} = {field.default!r}"
    for field in fields(Workload)
    if field.default is not MISSING
)
STUB = f'''"""In the place of autopar, for a file that imports it to say what is trained and how."""


class Workload:
{_DEFAULTS}

    def __init__(self, **given):
        vars(self).update(given)


def register_rule(*_given, **_named):
    """Concerns planning."""


register_kernel = register_rule
'''


def carried_sources(target: str) -> dict[str, str]:
    """Files of the user's by path inside the program. ``target``: ``"file.py:Name"``. Nothing of a
    workload that is in no file, as a script's."""
    file, _, name = target.partition(":")
    sources = _sources(Path(file).resolve(), name)
    if not sources:
        return {}
    files = {f"{WORKLOAD}/{path}": text for path, text in sources.items()}
    if any(_imports_autopar(text) for text in sources.values()):
        files[f"{WORKLOAD}/autopar.py"] = STUB
    return files


def carried_arrays(captured: Captured) -> dict[str, bytes]:
    """Numbers by path inside the program."""
    files = {}
    if captured.constants:
        files["constants.npz"] = _stored(captured.constants)
    if captured.draws is not None:
        from autopar.runtime.jax.exported import exported

        files["draws.bin"] = exported(captured.draws)
    return files


def _sources(file: Path, name: str) -> dict[str, str]:
    """The workload's file and modules that it imports, by path from its folder."""
    if not file.is_file() or _is_script(file, name):
        return {}
    sources = {file.name: file.read_text()}
    to_do = [(file, "")]
    while to_do:
        reader, package = to_do.pop()
        for imported in _imported(reader.read_text(), package):
            there = _file_of(imported, file.parent)
            if there is None:
                continue
            whole = there.name == "__init__.py"
            place = imported.replace(".", "/") + ("/__init__.py" if whole else ".py")
            if place not in sources:
                sources[place] = there.read_text()
                to_do.append((there, imported if whole else imported.rpartition(".")[0]))
    return sources


def _is_script(file: Path, name: str) -> bool:
    """Whether ``file`` is what made the plan, of a function of its own and no workload."""
    if getattr(sys.modules.get("__main__"), "__file__", None) == str(file):
        return True
    top = ast.parse(file.read_text()).body
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in top)


def _file_of(name: str, home: Path) -> Path | None:
    """Where a module of the user's own is: it lies in ``home``, or is imported."""
    if name.partition(".")[0] == "autopar":
        return None
    path = home / name.replace(".", "/")
    loaded = getattr(sys.modules.get(name), "__file__", None)
    places = [path.with_suffix(".py"), path / "__init__.py", *([Path(loaded)] if loaded else [])]
    for file in places:
        if file.suffix == ".py" and file.is_file() and is_users(str(file)):
            return file
    return None


def _imported(text: str, package: str) -> Iterator[str]:
    """Names of modules that a file in ``package`` may import, with the packages above them."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            above = ".".join(parts) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _imports_autopar(text: str) -> bool:
    return "autopar" in {name.partition(".")[0] for name in _imported(text, "")}


def _stored(arrays: Mapping[str, Any]) -> bytes:
    """As `numpy.savez` stores them, without the time of day; of dtypes that NumPy has not the bits,
    as unsigned integers."""
    import numpy as np

    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, value in arrays.items():
            array = np.asarray(value)
            if array.dtype.kind == "V":
                array = array.view(f"u{array.dtype.itemsize}")
            entry = io.BytesIO()
            np.lib.format.write_array(entry, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), entry.getvalue())
    return made.getvalue()
