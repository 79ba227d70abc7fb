"""Whether the gate turns red when what was once wrong is wrong again.

    python -m benchmarks.old_errors [--only NAME]... [--json]

Each error is the old code of one place, put back in a copy of the checkout, where the tests of the
gate's part that speaks of it are run until the first that fails. Where the text that it replaces is
not found exactly once, nothing is run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.every_case import EVERY_CASE
from benchmarks.figures import Target, show
from benchmarks.gate import FINDINGS

ROOT = Path(__file__).resolve().parents[1]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "out", "__pycache__")


@dataclass(frozen=True, slots=True)
class OldError:
    """In ``file`` of the checkout ``old`` stands where ``new`` once stood. ``tests``: words for
    pytest, of the files that the gate's ``part`` runs."""

    part: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_CONSTANTS, _CALLED, _NAMES = "constants, masks", "blocks called again, alarms", "names"
_TRAIN, _FALSE, _STOPPED = "one way to train", "precisions, false alarms", "SIGTERM, checkpoints"
_KEPT = "what a forward keeps, rows by masks"
_FOR_JAX = "arrays and rules of JAX users"
_MOVED = "labels that move, split sequences"
_CHOSEN = "choices pinned"
ERRORS: Mapping[str, OldError] = {
    "pieces that end a block do not move again": OldError(
        _CHOSEN, "autopar/lowering/issued.py",
        "        yield from _called_with(body.ops[last], body, times, pieces)\n", "        pass\n",
        ("tests/planner/test_tp_piece_plans.py",)),
    "a fixed dropout keeps nothing": OldError(
        _CHOSEN, "runtime/verify/pytorch/dropping.py",
        "torch.full((), share, dtype=x.dtype, device=x.device)", "share",
        ("tests/runtime/test_verify_rerun.py",)),
    "a sum is written in front of what is kept last": OldError(
        _CHOSEN, "autopar/emit/pytorch/forward.py",
        "if op.op.name in self.last_moves:", "if False:",
        ("tests/runtime/test_verify_rerun.py",)),
    "numbers below the normal ones of float16 are judged as normal": OldError(
        "layers in 8 bits", "runtime/pytorch/scaled_products.py",
        "(apart - least / 2).clamp(min=0)", "apart",
        ("tests/runtime/test_scaled_products.py",)),
    "ties in 8 bits are broken by the order of sums": OldError(
        "layers in 8 bits", "runtime/pytorch/scaled_reference.py",
        "        steps = torch.round(steps / _TIE) * _TIE\n", "        pass\n",
        ("tests/runtime/test_scaled_products.py",)),
    "labels of other ranks are counted where they were": OldError(
        _MOVED, "autopar/lowering/counts.py",
        "    steps = _steps(lowered, operand.name, tensors[operand.name].shared, wanted)\n",
        "    steps: tuple[Step, ...] = ()\n",
        ("tests/emit/test_sequences.py",)),
    "pieces that lie here and there are cut again": OldError(
        _MOVED, "autopar/lowering/spread.py",
        "            _check_in_place(scope.tensors[name], steps, block)\n", "            pass\n",
        ("tests/emit/test_sequences.py",)),
    "rows of a causal mask lose the mask beside it": OldError(
        _MOVED, "runtime/pytorch/layers.py",
        "_hidden_too(*band, keys.shape[2], window, hidden)",
        "_band(*band, keys.shape[2], window, q)",
        ("tests/runtime/test_attention_rows.py",)),
    "a causal bias is cast": OldError(
        _MOVED, "runtime/pytorch/layers.py",
        "        made.append(attend(",
        "        if seen.dtype is not torch.bool:\n"
        "            seen = seen.to(q.dtype)\n        made.append(attend(",
        ("tests/emit/test_sequences.py",)),
    "a buffer that a forward replaced stays replaced": OldError(
        _FALSE, "runtime/verify/pytorch/evaluation.py",
        "            setattr(owner, attribute, tensor)", "            pass",
        ("tests/runtime/test_verify_evaluation.py",)),
    "gradients that no op of a stage gives are reduced": OldError(
        _FALSE, "autopar/lowering/collectives.py",
        "graded=name in graded,", "graded=True,",
        ("tests/runtime/test_verify_evaluation.py",)),
    "an infinity is written as a name": OldError(
        _CONSTANTS, "autopar/emit/constants.py",
        "return f'float(\"{float.__repr__(value)}\")'", "return float.__repr__(value)",
        ("tests/emit/test_constants.py",)),
    "a zero loses its sign": OldError(
        _CONSTANTS, "autopar/emit/constants.py",
        "return value == other and (value != 0 or _sign(value) == _sign(other))",
        "return value == other",
        ("tests/emit/test_constants.py",)),
    "masks of minus infinity have no text": OldError(
        _CONSTANTS, "autopar/emit/constants.py",
        "if not isinstance(value, float) or not math.isfinite(value):",
        "if isinstance(value, float) and value == -math.inf:\n        return '-inf'\n"
        "    if not isinstance(value, float) or not math.isfinite(value):",
        ("tests/jax/test_masks.py",)),
    "a block that is called again is priced again": OldError(
        _CALLED, "autopar/pricing/cuts.py",
        "ties.append((last[instance], unit))", "pass",
        ("tests/planner/test_pipeline_search.py", "tests/runtime/test_shared_layers.py")),
    "what no op reads is in no stage": OldError(
        _CALLED, "autopar/lowering/stages.py",
        "frozenset() if i else whole.idle", "frozenset()",
        ("tests/runtime/test_idle_parameters.py",)),
    "layers called twice each are a loop over all of them once": OldError(
        _CALLED, "autopar/emit/pytorch/loops.py",
        "    stays = instances[0] == instances[1]\n", "    stays = False\n",
        ("tests/emit/test_orders_of_calls.py",)),
    "a memory that was None at first is zeros for ever": OldError(
        _KEPT, "autopar/frontends/pytorch/capture.py",
        "if trace.left != trace.before or trace.made:", "if trace.left != trace.before:",
        ("tests/frontends/test_torch_unseen.py",)),
    "what the first batch gave is taken for a table": OldError(
        _KEPT, "autopar/frontends/pytorch/same_again.py",
        "if name in second.kept and node not in given", "if name in second.kept",
        ("tests/frontends/test_torch_unseen.py",)),
    "an alarm ends the search": OldError(
        _CALLED, "autopar/planner/solve/standings.py",
        "        return drop(now, answer)\n", "        raise Impossible(now.alarms.on(answer))\n",
        ("tests/planner/test_physics.py",)),
    "instances of one class share a trial": OldError(
        "adapters", "runtime/pytorch/dry_run.py",
        "kind = (type(module), tuple(settings), tuple(tensors), tuple(inside))",
        "kind = (type(module),)",
        ("tests/emit/test_adapters.py",)),
    "any name is an attribute": OldError(
        _NAMES, "autopar/emit/names.py",
        "return name.isidentifier() and not keyword.iskeyword(name) and plain and not hidden",
        "return True",
        ("tests/emit/test_odd_names.py",)),
    "JAX keys stand as they are in quotes": OldError(
        _NAMES, "autopar/emit/jax/functions.py",
        'self.held[tensor.name] = _Held(Expr(f"{self.parameters}[{literal(tensor.name)}]"))',
        "self.held[tensor.name] = _Held(Expr(f'{self.parameters}[\"{tensor.name}\"]'))",
        ("tests/jax/test_odd_names.py",)),
    "one copy of a buffer is filled": OldError(
        _TRAIN, "runtime/pytorch/initialize.py",
        "for tensor in (self.tensor, *self.twins):", "for tensor in (self.tensor,):",
        ("tests/benchmarks/test_train_files.py", "-k", "plain and not jax")),
    "train.py has no loss scale": OldError(
        _TRAIN, "autopar/emit/pytorch/emit.py",
        'scales=plan.precision == "float16",', "scales=False,",
        ("tests/benchmarks/test_train_files.py", "-k", "half and not jax")),
    "an axis that the mesh lacks is one of size 1": OldError(
        _TRAIN, "runtime/pytorch/parameters.py",
        "if axis not in axes:", "if False:",
        ("tests/runtime/test_dry_run.py", "-k", "lacks")),
    "the schedule beside the program is not read": OldError(
        _TRAIN, "runtime/shared/program_module.py",
        "return lists_of(plan, file.read_text())", "return lists_of(plan)",
        ("tests/emit/test_stages.py", "tests/runtime/test_train_file.py")),
    "a compiled plan is written as the eager one": OldError(
        "fields of a plan", "autopar/emit/pytorch/train.py",
        '    if how.style != "eager":\n', "    if False:\n",
        ("tests/emit/test_plan_fields.py",)),
    "a loss is summed in 4 bytes": OldError(
        _FALSE, "autopar/lowering/state.py",
        "return max(LOSS_BYTES, DTYPE_BYTES[dtype])", "return LOSS_BYTES",
        ("tests/runtime/test_precisions.py",)),
    "the reference rounds constants by itself": OldError(
        _FALSE, "runtime/verify/jax/reference.py",
        "return np.float64(unrounded(np.float32(array)))",
        "return np.float64(np.format_float_scientific(np.float32(array), unique=True))",
        ("tests/jax/test_reference.py",)),
    "calls of stages are counted as they were compiled before": OldError(
        _FALSE, "runtime/verify/jax/counting.py",
        "anew = _USUAL if marked else {}", "anew: dict[str, int] = {}",
        ("tests/jax/test_reduce_dtype.py",)),
    "workers of a loader end at SIGTERM": OldError(
        _STOPPED, "runtime/pytorch/loader_workers.py",
        "signal.signal(one, self._signalled)", "signal.signal(one, signal.SIG_DFL)",
        ("tests/script/test_sigterm.py",)),
    "a damaged newest checkpoint is the end": OldError(
        _STOPPED, "runtime/shared/kept_checkpoints.py",
        "            damaged.append(error)\n            continue\n", "            raise\n",
        ("tests/script/test_state.py", "-k", "damaged or newest")),
    "what killed a job has no name": OldError(
        _STOPPED, "runtime/jobs/causes.py",
        'return f"{where} ({KILLED[name]})" if name in KILLED else where', "return where",
        ("tests/runtime/test_failures.py",)),
    "a step writes over the user's arrays": OldError(
        _FOR_JAX, "runtime/jax/processes.py",
        "return _copy(made) if _share_memory(made, given) else made", "return made",
        ("tests/jax/test_ownership.py",)),
    "factors of rules are small letters": OldError(
        _FOR_JAX, "autopar/rules/rule_text.py",
        "for name in sorted(names.intersection(CHOICES)):", "for name in ():",
        ("tests/rules/test_registry.py",)),
    "experts of libraries are traced": OldError(
        "mixtures of experts", "autopar/frontends/pytorch/experts.py",
        "if table is None:  # no such", "if True:  # no such",
        ("tests/runtime/test_experts.py",)),
}  # fmt: skip


def unfit(error: OldError) -> str:
    """Why an error cannot be put back, or that the gate does not run its tests; else nothing."""
    count = (ROOT / error.file).read_text().count(error.old)
    if count != 1:
        return f"{error.old!r} stands {count} times in {error.file}, and must once"
    files = [word for word in error.tests if word.startswith("tests/")]
    known = {test.partition("::")[0] for test in FINDINGS[error.part]} | set(FINDINGS[error.part])
    outside = [f for f in files if f not in known and str(Path(f).parent) not in known]
    return f"the gate's part {error.part!r} does not run {outside[0]}" if outside else ""


def run(name: str, error: OldError, copy: Path) -> dict[str, Any]:
    """A row: what the tests say of ``copy`` with the error, which is taken out again."""
    start = time.perf_counter()
    file = (copy / error.file).resolve()
    right = file.read_text()
    file.write_text(right.replace(error.old, error.new))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "AUTOPAR_MEASURE": "0", "PYTHONPATH": str(copy),
        EVERY_CASE: "1",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *error.tests],
            cwd=copy, env=environment, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        file.write_text(right)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    by = failed[0].split(" - ")[0].partition(" ")[2].rpartition("::")[2][:70] if failed else ""
    return {
        "error": name,
        "part": error.part,
        "verdict": "red" if done.returncode == 1 else f"exit code {done.returncode}",
        "by": by,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="errors of this name")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    errors = {n: e for n, e in ERRORS.items() if not given.only or n in given.only}
    for error in errors.values():
        why = unfit(error)
        if why:
            parser.error(why)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=_LEFT_OUT)
        for name, error in errors.items():
            rows.append(run(name, error, copy))
            print(f"{name}: {rows[-1]['verdict']}", file=sys.stderr, flush=True)
    green = sum(row["verdict"] != "red" for row in rows)
    parts = FINDINGS.keys() - {"bad input"}
    missing = 0 if given.only else len(parts - {e.part for e in ERRORS.values()})
    targets = [
        Target("old errors that leave the gate green", green, 0),
        Target("parts of the gate without an old error", missing, 0),
    ]
    show(rows, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
