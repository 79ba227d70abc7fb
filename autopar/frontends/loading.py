"""Finding the one model of a user's file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload, workload_of
from autopar.rules.implementations.kernels import forget_own


class LoadError(UserError):
    """The file that should hold the model cannot give one."""


class NoModel(LoadError):
    """There is no such file, or it has no model of that name."""


def load_workload(target: str) -> Workload:
    """The workload of ``"model.py"``, or of ``"model.py:Name"`` where the file has several.

    A name may be a `Workload` or a class under `parallelize`; without a name, what the file only
    imports does not count. Raises `LoadError` for no file, no model, two models, an unknown name,
    or a file that fails while it runs.
    """
    path, _, name = target.partition(":")
    forget_own()  # kernels are those of the model whose file registers them
    module = _run(Path(path))
    workloads = _models(module)
    if name:
        value = getattr(module, name, None)
        workload = workload_of(value)
        if workload is None:
            has = f"it has {_listing(workloads)}" if workloads else "it has no model at all"
            what = (
                "does not exist" if value is None else f"is a {type(value).__name__}, not a model"
            )
            raise NoModel(f"{target}: {name} {what} in {path}; {has}")
        return workload
    if not workloads:
        raise LoadError(
            f"{path} has no model: put @autopar.parallelize(batch=...) on an nn.Module class, or "
            "write workload = autopar.Workload(model=..., batch=...)"
        )
    if len(workloads) > 1:
        first = next(iter(workloads))
        raise LoadError(
            f"{path} has {len(workloads)} models, {_listing(workloads)}: say which, as in "
            f"{path}:{first}"
        )
    return next(iter(workloads.values()))


def _models(module: ModuleType) -> dict[str, Workload]:
    """Models that the file itself makes, by name, each once."""
    workloads: dict[str, Workload] = {}
    for name, value in vars(module).items():
        workload = workload_of(value)
        imported = isinstance(value, type) and value.__module__ != module.__name__
        if workload is None or imported or any(workload is other for other in workloads.values()):
            continue
        workloads[name] = workload
    return workloads


def _listing(workloads: dict[str, Any]) -> str:
    return ", ".join(sorted(workloads))


class _Uncached(SourceFileLoader):
    """Compiles the file as it stands now.

    Python's cache takes a file that was changed within a second, at the same length, for the old
    one; and it is written beside the user's file.
    """

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise NoModel(f"{path} is not a file; give a Python file, as in model.py or model.py:Name")
    path = path.resolve()
    if path.suffix != ".py":
        raise LoadError(f"{path} is not a Python file: its name must end in .py")
    loader = _Uncached(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickles of the file look their module up by name; so do files beside it
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(_failure(path, error)) from error
    finally:
        sys.path.remove(str(path.parent))
        if before is not None:
            sys.modules[path.stem] = before
    return module


def _failure(path: Path, error: BaseException) -> str:
    """Where in the user's file it failed: the last of its lines on the traceback."""
    if isinstance(error, SyntaxError):
        place = f"{path}:{error.lineno}" if error.lineno else str(path)  # a null byte has no line
        return f"{place}: {error.msg}"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    place = f"{path}:{lines[-1].lineno}" if lines else str(path)
    return f"{place}: {type(error).__name__}: {error}"
