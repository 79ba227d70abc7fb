"""Breaking one function of the package in this process, and verifying a plan with it.

The body of the function is compiled again with one piece of its text replaced, and put in the place
of its own code, so that everybody who has the function has the broken one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_fork = get_context("fork")


class CannotPlant(Exception):
    """The text to replace does not stand where it should, exactly once."""


@dataclass(frozen=True, slots=True)
class Planted:
    """One error.

    part:   capture, lifting, rules, lowering, emission or runtime.
    case:   of `benchmarks.planted_models`, which without the error is right.
    where:  ``module:function``; ``new`` stands there instead of ``old``.
    planned: whether it changes what is planned; else the right plan runs with it.
    """

    name: str
    part: str
    case: str
    where: str
    old: str
    new: str
    planned: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """A workload of `benchmarks.planted_models` under a layout."""

    workload: str
    fix: Mapping[str, str]

    @property
    def framework(self) -> str:
        return "jax" if self.workload.startswith("jax_") else "torch"

    @property
    def devices(self) -> int:
        degrees = ("pp", "tp", "tp2", "cp", "cp_ring", "cp_head", "dp_shard", "dp_replicate")
        count = 1
        for degree in degrees:
            count *= int(self.fix.get(degree, "1"))
        return count


def plant(error: Planted) -> None:
    """Raises `CannotPlant` where the code is not what the error speaks of."""
    function = _function(error)
    function.__code__ = _replaced(error, function)


CARRIED = "runtime.jax.parallel."
"""Where the functions stand that JAX programs carry as text: an error goes into that."""


def in_emission(name: str, case: str, where: str, old: str, new: str) -> Planted:
    """An error in what writes JAX programs."""
    return Planted(name, "emission", f"jax {case}", f"emit.jax.{where}", old, new)


def in_runtime(name: str, case: str, where: str, old: str, new: str) -> Planted:
    """An error in what JAX programs carry."""
    place = f"{CARRIED}{where}"
    return Planted(name, "runtime", f"jax {case}", place, old, new, planned=False)


def plant_in_program(error: Planted, plan: Path) -> None:
    """Breaks the function in ``parallel.py`` of a plan. Raises `CannotPlant`."""
    file = plan / "program" / "parallel.py"
    text = file.read_text()
    node: Any = ast.parse(text)
    for part in error.where.partition(":")[2].split("."):
        node = next((n for n in node.body if getattr(n, "name", None) == part), None)
        if node is None:
            raise CannotPlant(f"{error.name}: the program has no {error.where}")
    lines = text.splitlines(keepends=True)
    whole = "".join(lines[node.lineno - 1 : node.end_lineno])
    if whole.count(error.old) != 1:
        raise CannotPlant(f"{error.name}: {error.old!r} is not once in {file}")
    lines[node.lineno - 1 : node.end_lineno] = [whole.replace(error.old, error.new)]
    file.write_text("".join(lines))


def check(error: Planted) -> None:
    """`plant` without doing it."""
    _replaced(error, _function(error))


def _function(error: Planted) -> FunctionType:
    module, _, path = error.where.partition(":")
    target: Any = importlib.import_module(f"autopar.{module}")
    for part in path.split("."):
        target = inspect.getattr_static(target, part, None)
        if isinstance(target, staticmethod | classmethod):
            target = target.__func__
        if isinstance(target, property):
            target = target.fget
    target = inspect.unwrap(target) if callable(target) else target
    if not isinstance(target, FunctionType):
        raise CannotPlant(f"{error.name}: there is no function {error.where}")
    return target


def _replaced(error: Planted, function: FunctionType) -> CodeType:
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(error.old) != 1:
        raise CannotPlant(
            f"{error.name}: {error.old!r} stands {text.count(error.old)} times in {error.where}, "
            "and must once: say again what the error replaces"
        )
    tree = ast.parse(text.replace(error.old, error.new))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    if function.__code__.co_freevars:
        # what a method knows of its class, by ``super()``, comes from around it
        around = ast.parse(f"def around({', '.join(function.__code__.co_freevars)}): pass")
        assert isinstance(around.body[0], ast.FunctionDef)
        around.body[0].body, tree = [definition], around
    future = __import__("__future__").annotations.compiler_flag
    ast.fix_missing_locations(tree)
    made: CodeType = compile(tree, "<planted>", "exec", future, dont_inherit=True)
    while made.co_name != function.__name__:
        (made,) = (c for c in made.co_consts if isinstance(c, CodeType))
    return made


def write_plan(case: Case, folder: Path) -> None:
    """Plans a case into ``folder``. Raises what planning raises."""
    from autopar.cli.commands import plan_files
    from autopar.files import plan_folder
    from autopar.planner import plan

    cluster = folder.with_suffix(".yaml")
    cluster.write_text(
        f"name: cores\ngroups:\n  - {{device: cpu-core, count: {case.devices}}}\nlevels:\n"
        f"  - {{name: loopback, span: {case.devices}, bandwidth: 1 GB/s, latency: 100 us}}\n"
    )
    file = "planted_jax_models.py" if case.framework == "jax" else "planted_models.py"
    model = Path(__file__).with_name(file)
    result = plan(f"{model}:{case.workload}", str(cluster), dict(case.fix))
    plan_folder.write(folder, plan_files(result, folder)[0])


def judged(case: Case, error: Planted | None, folder: Path, scratch: Path) -> dict[str, Any]:
    """What ``verify`` says of a case with an error: a row, as `verdict` words it.

    ``folder``: the right plan of the case; ``scratch``: an empty folder.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    plan = folder
    if error is None or error.planned:
        plan = folder if error is None else scratch / "plan"
        failed = _in_a_fork(_plan, error, case, plan, scratch)
        if failed:
            return {"verdict": f"refused to plan: {failed}"}
    if error is not None and error.where.startswith(CARRIED):
        plan = scratch / "plan"
        shutil.copytree(folder, plan)
        plant_in_program(error, plan)
        error = None
    failed = _in_a_fork(_VERIFY[case.framework], error, case, plan, scratch)
    result = scratch / "result.json"
    if not result.exists():
        return {"verdict": f"refused to verify: {failed}"}
    results = json.loads(result.read_text())
    return verdict(results if case.framework == "jax" else results[0])


def verdict(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A row of what `VerifyResult` holds as JSON."""
    from autopar.runtime.verify.verified import TOLERANCE, VerifyResult

    result = VerifyResult.read(dict(fields))
    off = {name: getattr(result.exact, name) for name in ("loss", "gradient", "weight")}
    exceeded = [name for name, value in off.items() if value > TOLERANCE]
    exceeded += ["collectives"] if result.collectives_match is False else []
    return {"verdict": "right" if result.passed else "WRONG", "told by": ", ".join(exceeded), **off}


def _in_a_fork(job: Any, error: Planted | None, case: Case, plan: Path, scratch: Path) -> str:
    """Why ``job`` failed in a process of its own, or nothing."""
    why = scratch / "why.txt"
    why.unlink(missing_ok=True)
    process = _fork.Process(target=_guarded, args=(job, error, case, plan, scratch, why))
    process.start()
    process.join()
    if why.exists():
        return why.read_text()
    return f"exit code {process.exitcode}" if process.exitcode else ""


def _guarded(job: Any, error: Planted | None, case: Case, plan: Path, to: Path, why: Path) -> None:
    log = os.open(to / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if error is not None:
            plant(error)
        job(case, plan, to)
    except BaseException as failed:  # whatever the error brings about is its row
        why.write_text(f"{type(failed).__name__}: {' '.join(str(failed).split())[:160]}")
    os._exit(0)


def _plan(case: Case, plan: Path, scratch: Path) -> None:
    write_plan(case, plan)


def _verify_torch(case: Case, plan: Path, scratch: Path) -> None:
    from autopar.runtime.jobs.local_ranks import start
    from autopar.runtime.verify.pytorch import verify

    verify._locate = lambda *_: ""  # where it differs first is not asked here
    options = json.dumps({"plans": [str(plan)], "device": "cpu", "timeout_s": 60})
    codes = start(
        case.devices, "autopar.runtime.jobs.pytorch_worker", ["verify", options, str(scratch)]
    )
    if any(codes):
        errors = [json.loads(f.read_text()) for f in sorted(scratch.glob("error-*.json"))]
        first = min(errors, key=lambda e: e["time"], default={"error": codes, "message": ""})
        raise RuntimeError(f"{first['error']}: {first['message']}")


def _verify_jax(case: Case, plan: Path, scratch: Path) -> None:
    os.environ["XLA_FLAGS"] = " ".join(
        [
            f"--xla_force_host_platform_device_count={case.devices}",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
        ]
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    from autopar.runtime.verify.jax import verify as jax_verify

    jax_verify.locate = lambda *_: ""  # type: ignore[attr-defined]
    (scratch / "result.json").write_text(json.dumps(jax_verify.verify(plan)))


_VERIFY = {"torch": _verify_torch, "jax": _verify_jax}
