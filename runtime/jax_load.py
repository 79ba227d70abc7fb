"""From a plan folder to a trainer of its JAX program, with everything checked."""

from __future__ import annotations

import itertools
import linecache
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar import plan_folder
from autopar.errors import UserError
from autopar.frontends.jax import Captured, paths_of
from autopar.frontends.jax.capture import capture_workload
from autopar.frontends.loading import load_workload
from autopar.nouns.batch import BatchEntry
from autopar.nouns.plan import Plan
from autopar.runtime import jax_checkpoint, jax_program
from autopar.runtime.divergence import check_loss
from autopar.runtime.jax_layout import by_name
from autopar.runtime.jax_train import Step, placed
from autopar.runtime.planned_batch import check_planned
from autopar.runtime.settings import (
    ProgramError,
    check_settings,
    check_workload,
    compiled,
    tell_changes,
)
from autopar.runtime.stale import changed_batch, check_fingerprint, check_tool
from autopar.workload import Workload

_serial = itertools.count()


class TooFewDevices(UserError):
    """The plan is for more devices than jax sees."""


@dataclass(slots=True)
class Trainer:
    """A program in training. ``gradient_norm`` of the last step, 0 where nothing is clipped."""

    workload: Workload
    compiled: Step
    state: dict[str, Any]
    gradient_norm: Any = 0.0
    planned: Sequence[BatchEntry] = ()
    _run: Any = None

    @property
    def step_number(self) -> int:
        """Steps taken so far."""
        return int(self.state["step"])

    def step(self, batch: Mapping[str, Any]) -> Any:
        """One step on a global batch; returns its loss.

        Raises `OtherBatch` for a batch that was not planned for.
        """
        if self.planned:
            check_planned(_as_jax_takes(batch), self.planned)
        cut = self.compiled.cut(batch)
        if self._run is None:
            self._run = self.compiled.step.lower(self.state, cut).compile()
        self.state, loss, self.gradient_norm = self._run(self.state, cut)
        return loss

    @property
    def peak_memory_bytes(self) -> int:
        """What XLA asks of one device for a step: its arguments and its temporary arrays. 0 before
        the first step."""
        found = None if self._run is None else self._run.memory_analysis()
        if found is None:
            return 0
        return int(found.argument_size_in_bytes + found.temp_size_in_bytes)

    def save(self, folder: str | Path) -> None:
        """Writes parameters by full name, and the optimizer's slots, whole: any plan of the model
        can go on from them."""
        layout = self.compiled.layout
        arrays: dict[str, Any] = {"step": np.asarray(self.state["step"])}
        for slot in self.state:
            if slot not in ("step", "frozen"):
                named = layout.names(self.state[slot])
                arrays.update((f"{slot}/{n}", np.asarray(a)) for n, a in named.items())
        jax_checkpoint.write(folder, arrays)

    def load(self, folder: str | Path) -> None:
        """Goes on from what `save` wrote, under this plan or another.

        Raises `CheckpointError`, and leaves the trainer as it was.
        """
        layout = self.compiled.layout
        wanted: dict[str, Any] = {"step": self.state["step"]}
        for slot in self.state:
            if slot not in ("step", "frozen"):
                named = jax.eval_shape(layout.names, self.state[slot])
                wanted.update((f"{slot}/{n}", a) for n, a in named.items())
        arrays = jax_checkpoint.read(folder, wanted)
        state: dict[str, Any] = {"step": arrays["step"]}
        for slot in self.state:
            if slot not in ("step", "frozen"):
                head = f"{slot}/"
                own = {n[len(head) :]: a for n, a in arrays.items() if n.startswith(head)}
                state[slot] = layout.gather_names(own)
        specs = placed(self.compiled.mesh, self.compiled.state_specs)
        frozen = {"frozen": self.state["frozen"]}  # the loss has them, a checkpoint does not
        del specs["frozen"]
        self.state = {**jax.device_put(state, specs), **frozen}


def _as_jax_takes(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as shapes with the dtypes that JAX gives them: NumPy's 64 bits become 32."""
    return {
        name: jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        if hasattr(value, "dtype")
        else value
        for name, value in batch.items()
    }


def load(folder: str | Path, check_model: bool = True) -> Trainer:
    """The trainer of the plan in ``folder``, with the initial parameters of the workload.

    Raises `StalePlan`, `TooFewDevices`, and what reading the folder raises.
    """
    plan = plan_folder.read_plan(folder)
    workload = load_workload(plan_folder.workload_of(folder, plan))
    captured = capture_workload(workload)
    if check_model:
        check_model_of(plan, captured, workload, folder)
    assert workload.init is not None
    init = workload.init
    step = Step(read_program(folder), workload)

    def parameters() -> Mapping[str, Any]:
        tree = init(jax.random.key(workload.seed))
        return step.layout.gather_names(by_name(paths_of(tree), captured.stacks))

    planned = plan_folder.read_batch(folder)
    return Trainer(workload, step, step.initial(parameters, captured.constants), planned=planned)


def check_model_of(plan: Plan, captured: Captured, workload: Workload, folder: str | Path) -> None:
    """Raises `StalePlan` where ``captured`` is not what was planned, or not by this version, and
    `StaleSettings` where ``workload`` trains it otherwise."""
    check_tool(plan)
    check_workload(plan, workload)
    check_fingerprint(plan, captured.fingerprint(), changed_batch(folder, captured.batch))
    tell_changes(plan, workload, captured.digests)


def read_program(folder: str | Path, lift: str | None = None) -> ModuleType:
    """Runs ``program/train.py`` of a plan folder; ``lift`` is for every float that it names."""
    file = plan_folder.code_of(folder, "jax")
    module = run_program(file.read_text(), str(file), lift)
    check_settings(plan_folder.read_plan(folder), module.MESH, module.SETTINGS)
    return module


@contextmanager
def lifted(dtype: str | None) -> Iterator[None]:
    """Inside, programs that are read mean ``dtype`` by every float; None: what they say."""
    names = ("FP32", "BF16", "FP16")
    before = {name: getattr(jax_program, name) for name in names}
    try:
        for name in names if dtype is not None else ():
            setattr(jax_program, name, np.dtype(dtype))
        yield
    finally:
        for name, known in before.items():
            setattr(jax_program, name, known)


def run_program(text: str, file: str = "<program>", lift: str | None = None) -> ModuleType:
    """Runs the text of a program as a module of its own, see `lifted`. Raises `TooFewDevices`."""
    name = f"autopar_jax_program_{next(_serial)}"
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    with lifted(lift):
        exec(compiled(text, file), module.__dict__)
    if not hasattr(module, "loss"):
        raise ProgramError(f"{file} is no JAX program of autopar: it has no function `loss`")
    needed, seen = int(np.prod([1, *module.MESH.values()])), jax.device_count()
    if needed > seen:
        raise TooFewDevices(
            f"the plan is for {needed} devices, jax sees {seen}. On a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}, or use `autopar run`; "
            "else plan for the devices there are"
        )
    return module


def train(options: Mapping[str, Any], where: dict[str, str]) -> dict[str, Any]:
    """``steps`` steps of ``plan``, printed; the fields of `autopar.runtime.launch.RunResult`.

    ``where["step"]`` says what is being done.
    """
    from statistics import median

    folder = options["plan"]
    plan = plan_folder.read_plan(folder)
    predicted = plan.prediction.step_time_s
    trainer = load(folder)
    if options["resume"]:
        trainer.load(options["resume"])
    losses, times = [], []
    for _ in range(options["steps"]):
        number = trainer.step_number
        where["step"] = f"in step {number}"
        batch = batch_of(trainer.workload, number)
        begin = time.perf_counter()
        losses.append(float(trainer.step(batch)))
        times.append(time.perf_counter() - begin)
        print(
            f"step {number}  loss {losses[-1]:.6f}  {times[-1]:.4f} s "
            f"(predicted {predicted:.4f} s)",
            flush=True,
        )
        check_loss(losses, number, trainer.workload)
        every = options["save_every"]
        if options["save"] and every and trainer.step_number % every == 0:
            trainer.save(options["save"])
    if options["save"]:
        trainer.save(options["save"])
    settled = times[1:] or times  # the first step compiles
    return {
        "losses": losses,
        "step_time_s": median(settled) if settled else 0.0,
        "predicted_step_time_s": predicted,
        "ranks": plan.device_count,
        "step": trainer.step_number,
        "peak_memory_bytes": trainer.peak_memory_bytes,
        "memory_is": "arguments and temporaries of the compiled step on one device, as XLA counts "
        "them, without what the runtime holds",
        "memory_compares": False,
    }


def batch_of(workload: Workload, step: int) -> Mapping[str, Any]:
    """The global batch of a step: ``batch(step)`` where it takes the number, else ``batch()``."""
    import inspect

    taken = inspect.signature(workload.batch).parameters.values()
    numbered = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken)
    return workload.batch(step) if numbered else workload.batch()


__all__ = ["TooFewDevices", "Trainer", "load", "read_program", "train"]
