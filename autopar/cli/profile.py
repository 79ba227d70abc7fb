"""`autopar profile`: measures ops and collectives on the devices at hand, into a profile.

One process a device (gloo on CPU, NCCL on GPUs) runs `autopar.runtime.profile.worker`, or for JAX
one process that sees all of them `autopar.runtime.profile.jax.worker`; this half needs no
framework. Each figure is stored as soon as it is known, and what the profile already holds for this
machine is not measured again, so an interrupted run goes on where it ended.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from autopar.cost_models.calibrate import run_basis
from autopar.cost_models.measured_routes import rows_of
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from autopar.cost_models.profile_file import ProfileError
from autopar.cost_models.slices import jax_kind
from autopar.files.cluster_file import load_cluster
from autopar.files.local_cluster import gpu_driver
from autopar.files.plan_folder import read_cluster, read_plan
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Framework
from autopar.runtime.jobs.host_memory import environment
from autopar.runtime.jobs.jax_launch import environment as jax_environment
from autopar.runtime.jobs.pytorch_launch import Launcher, local_launcher
from autopar.runtime.jobs.result import RunResult

WORKERS: Mapping[Framework, str] = MappingProxyType(
    {"torch": "autopar.runtime.profile.worker", "jax": "autopar.runtime.profile.jax.worker"}
)


def profile_cluster(
    cluster: str | Path,
    database: str | Path,
    progress: Callable[[str], None] = print,
    launcher: Launcher | None = None,
    framework: Framework = "torch",
) -> str:
    """Measure the devices of `cluster`; returns a line that sums it up.

    `launcher` starts the measuring processes where this machine is not all of the cluster, for
    PyTorch; ``framework`` is what programs are of that the figures are to price.

    Raises:
        ProfileError: the cluster's devices are not here, or the measuring processes failed.
    """
    described = load_cluster(cluster)
    versions = libraries(framework)
    if versions is None:
        raise ProfileError(f"{framework} is not installed here, which is to measure; install it")
    if launcher is None and framework == "torch":
        _check_here(described)
    machine = Machine(described.device.name, driver(), versions, processor())
    progress(f"measuring {described.device_count} x {described.device.name}")
    with ProfileDb(database, progress) as db:
        failed = measure(db, machine, described, launcher, progress, framework)
        if failed:
            raise ProfileError(f"measuring stopped; what was measured is in {database}. {failed}")
        return f"{len(db.measurements(machine))} measurements of {machine.id} in {database}"


def remember(
    folder: str | Path, result: RunResult, database: str | Path, warn: Callable[[str], None]
) -> str:
    """Writes what a run measured beside what had been predicted; returns a line that says so.

    The next plan with this profile prices each phase by what runs took: their median.
    """
    plan, cluster = read_plan(folder), read_cluster(folder)
    device, prediction = cluster.device, plan.prediction
    predicted = {
        "forward": prediction.forward_time_s,
        "backward": prediction.backward_time_s,
        "optimizer": prediction.optimizer_time_s,
    }
    phases = dict(result.phases_s)
    measured = {**phases, "backward": phases.get("backward", 0.0) + phases.get("exchange", 0.0)}
    versions = libraries(plan.framework) or ""
    machine = Machine(device.name, driver(), versions, processor())
    basis = run_basis(bool(device.rates), plan.style)
    if result.style != plan.style:
        return (
            f"{folder} is planned for {plan.style} execution and the run was {result.style}: "
            f"{database} stays as it is"
        )
    known = [p for p in predicted if predicted[p] > 0 and measured.get(p, 0.0) > 0]
    now = datetime.now(UTC).isoformat("T", "seconds")
    routes = _remember_routes(machine, plan, result, database, warn, now)
    if not known:
        stays = "" if routes else f", {database} stays as it is"
        return f"{folder}: its phases were not told apart{stays}{routes}"
    with ProfileDb(database, warn) as db:
        for phase in known:
            # What the prices say without the corrections that this plan was made with.
            plain_s = predicted[phase] / device.slower(phase)
            pair = {"measured": measured[phase], "predicted": plain_s}
            head, count = f"{basis} {plan.fingerprint()}", len(result.losses)
            rows = [
                Measurement("run", f"{phase} {what} {head}", 0.0, 0.0, seconds, 0.0, count, now)
                for what, seconds in pair.items()
            ]
            db.add(machine, *rows)
        ops = any(m.subject == "op" for m in db.measurements(machine))
    ratios = ", ".join(f"{p} {measured[p] / predicted[p]:.2f}" for p in known)
    written = f"measured / predicted written to {database}: {ratios}"
    if ops == bool(device.rates):
        return written + routes
    made, use = "built-in figures, without this profile", "plan again with it, then run"
    if device.rates:
        made = "another profile or one of another machine"
        use = "give --profile that one here, or measure here with `autopar profile`"
    return f"{written}. No plan will use them: this one was made with {made}; {use}{routes}"


def _remember_routes(
    machine: Machine,
    plan: Plan,
    result: RunResult,
    database: str | Path,
    warn: Callable[[str], None],
    now: str,
) -> str:
    """Writes how uneven a run's routes were, for the next plan of the same model; says so."""
    if not result.routes:
        return ""
    mean, worst = result.routes["mean"], result.routes["worst"]
    with ProfileDb(database, warn) as db:
        model, steps = plan.fingerprints.model, len(result.losses)
        db.add(machine, *rows_of(model, mean, worst, steps, now, result.expert_loads))
    each = f", and those of each expert of {len(result.expert_loads)} layers"
    return (
        f"; the busiest expert's rows over the mean, {mean:.2f} (at worst {worst:.2f})"
        f"{each if result.expert_loads else ''}, too"
    )


def libraries(framework: str) -> str | None:
    """Versions that a measurement depends on; None where there is no such framework."""
    try:
        return f"{framework} {version(framework)}"
    except PackageNotFoundError:
        return None


def installed() -> Framework:
    """What measures where nobody says: PyTorch where it is there."""
    return "torch" if libraries("torch") or not libraries("jax") else "jax"


def processor() -> str:
    """The CPU: its model and how many cores there are."""
    model = platform.processor() or platform.machine()
    table = Path("/proc/cpuinfo")
    if table.is_file():
        named = re.search(r"^model name\s*:\s*(.+)$", table.read_text(), re.MULTILINE)
        model = named.group(1).strip() if named else model
    return f"{model}, {os.cpu_count()} cores"


def driver() -> str:
    """What runs the devices: the GPUs' driver, else the operating system."""
    return gpu_driver() or f"{platform.system()} {platform.release()}"


def _check_here(described: Cluster) -> None:
    local = load_cluster("local")
    if described.device.name != local.device.name or described.device_count > local.device_count:
        raise ProfileError(
            f"{described.name} has {described.device_count} x {described.device.name}, "
            f"this machine {local.device_count} x {local.device.name}; "
            "profile where the devices are"
        )


def measure(
    db: ProfileDb,
    machine: Machine,
    cluster: Cluster,
    launcher: Launcher | None,
    progress: Callable[[str], None],
    framework: Framework = "torch",
    worker: str = "",
) -> str:
    """Stores what the processes print; returns the last of their errors, "" without one.

    ``worker``: the module that they run; the one that measures everything where none is named.
    """
    worker = worker or WORKERS[framework]
    with tempfile.TemporaryDirectory(prefix="autopar-") as scratch:
        known, errors = Path(scratch) / "known.json", Path(scratch) / "errors"
        known.write_text(json.dumps(sorted(db.done(machine))))
        with (
            environment(),
            errors.open("w") as stderr,
            subprocess.Popen(
                _command(cluster, framework, worker, known, launcher),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(cluster) if framework == "jax" else None,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                measurement = _measurement(line)
                if measurement is None:
                    for note in _left_out(line):
                        progress(note)
                else:
                    db.add(machine, measurement)
                    progress(_shown(measurement))
        tail = [line for line in errors.read_text().splitlines() if line.strip()][-5:]
        return "\n".join(tail) or "no error message" if process.returncode else ""


def _command(
    cluster: Cluster, framework: Framework, worker: str, known: Path, launcher: Launcher | None
) -> list[str]:
    count = cluster.device_count
    if framework == "jax":
        kind = jax_kind(cluster.device.name)
        return [sys.executable, "-m", worker, str(known), str(count), kind]
    launcher = launcher or local_launcher(count, known.with_name("exit_codes.json"))
    return [*launcher, "-m", worker, str(known)]


def _environment(cluster: Cluster) -> dict[str, str]:
    """Under which jax sees the devices of the cluster alone, on a CPU virtual ones."""
    of_kind = {"cpu": "cpu", "gpu": "cuda"}
    return jax_environment(cluster.device_count, of_kind.get(cluster.device.kind, ""))


def _measurement(line: str) -> Measurement | None:
    """What a line of the measuring processes says; None for anything else that they print."""
    if not line.startswith("{") or line.startswith('{"left_out"'):
        return None
    return Measurement(**json.loads(line), measured_at=datetime.now(UTC).isoformat("T", "seconds"))


def _left_out(line: str) -> list[str]:
    """What to say of a measurement that the processes did not keep; nothing for other lines."""
    if not line.startswith('{"left_out"'):
        return []
    lost = json.loads(line)
    return [
        f"{lost['left_out']} {lost['key']} {lost['size_bytes']:.3g} B: left out, it added "
        f"{lost['seconds'] * 1e6:.1f} us to the compute beside it, less than the noise"
    ]


def _shown(m: Measurement) -> str:
    return f"{m.subject} {m.key} {m.size_bytes:.3g} B: {m.seconds * 1e6:.1f} us"
