"""Compiling the training step of a JAX plan ahead, for devices that need not be there.

`compile_ahead` starts a process of its own, since the environment that a compiler needs must be
there before jax is; that process is this module::

    python -m autopar.runtime.ahead.compile_job '{"json": "options"}' <file for the result>
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autopar.lowering.collectives import Row
from autopar.runtime.ahead.described import CannotCompile, Described, environment
from autopar.runtime.jobs.failures import failure, report

_BETWEEN_SLICES = re.compile(r" send\(.*_xla_megascale_transfer_type=")
_DUMPED = ("--xla_jf_dump_hlo_text=true", "--xla_jf_dump_llo_text=false")
_SHOWN = 400
"""Letters of what a process that died wrote."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler made of a step: bytes on one device, and its collectives.

    results:     bytes of what a step returns in no argument's place.
    hosts_move:  messages that hosts pass between slices, which no collective of the module is.
    collectives: empty with a reason in ``unread`` where the compiled module cannot be read.
    """

    target: str
    compiler: str
    time_s: float
    arguments: int
    temporaries: int
    results: int
    code: int
    collectives: tuple[Row, ...]
    unread: str = ""
    hosts_move: int = 0

    @property
    def total(self) -> int:
        """Of arrays."""
        return self.arguments + self.temporaries + self.results


def check(target: Described) -> None:
    """Raises `CannotCompile` where there is no compiler for ``target``, or it does not know it."""
    if target.platform != "cpu":
        _start({"target": target.as_dict()}, target)


def compile_ahead(folder: str | Path, target: Described) -> Compiled:
    """Compiles the step of the plan in ``folder``.

    Raises:
        CannotCompile: no compiler, an unknown topology, a compiler that ended.
        UserError:     what reading the plan raises.
    """
    options = {"target": target.as_dict(), "plan": str(folder)}
    made = _start(options, target)
    if made["unread"] and target.platform == "tpu":
        with tempfile.TemporaryDirectory(prefix="autopar-") as dump:  # libtpu prints what it made
            made = _start({**options, "dump": dump}, target, dump)
    rows = tuple(Row(**row) for row in made.pop("collectives"))
    return Compiled(target=str(target), collectives=rows, **made)


def _start(options: Mapping[str, Any], target: Described, dump: str = "") -> dict[str, Any]:
    """The result of a process that this module is; ``dump``: where libtpu writes its modules."""
    with tempfile.TemporaryDirectory(prefix="autopar-") as results:
        file = Path(results) / "result.json"
        command = [sys.executable, "-m", __spec__.name, json.dumps(options), str(file)]
        env = {**os.environ, **environment(target)}
        if dump:
            flags = [os.environ.get("LIBTPU_INIT_ARGS", ""), f"--xla_jf_dump_to={dump}", *_DUMPED]
            env["LIBTPU_INIT_ARGS"] = " ".join(flags)
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if not file.exists():
            last = " ".join(done.stderr.split())[-_SHOWN:]
            raise CannotCompile(
                f"--compile: the compiler for {target} ended with exit code {done.returncode} and "
                f"no result; it wrote: {last}"
            )
        answer: dict[str, Any] = json.loads(file.read_text())
    if "error" in answer:
        raise failure(answer, f"compiling for {target}")
    result: dict[str, Any] = answer["result"]
    return result


def main(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the process answers: its result, or the error that it stops with."""
    folder = options.get("plan", "")
    try:
        target = Described.from_dict(options["target"])
        dump = options.get("dump", "")
        return {"result": _compiled(folder, target, dump) if folder else _known(target)}
    except Exception as error:  # the parent prints it
        return report(error, 0, "while compiling", folder)


def _known(target: Described) -> dict[str, Any]:
    from autopar.runtime.ahead.described import devices_of

    devices_of(target)
    return {}


def _compiled(folder: str, target: Described, dump: str) -> dict[str, Any]:
    from autopar.runtime.ahead.described import devices_of, standing_in
    from autopar.runtime.verify.jax import counting

    devices = devices_of(target)
    with standing_in(target, devices):
        step, batch = _step(folder)
        lowered = step.step.lower(*step.shapes(batch))
        if target.platform == "cpu":  # which widens bfloat16
            counting.mark_asked_dtypes(lowered.compiler_ir("stablehlo").operation)
        begin = time.perf_counter()
        made = lowered.compile()
    compiled_s = time.perf_counter() - begin
    memory = made.memory_analysis()
    rows, unread, messages = _collectives(made, step.layout, dump)
    return {
        "compiler": _compiler(target),
        "time_s": compiled_s,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "collectives": [asdict(row) for row in rows],
        "unread": unread,
        "hosts_move": messages,
    }


def _step(folder: str) -> tuple[Any, Mapping[str, Any]]:
    """The step of a plan's program, and a batch that it takes."""
    from autopar.runtime.jax.load import read
    from autopar.runtime.jax.programs import read_step

    start = read(folder)
    return read_step(folder, start.workload), start.batch(0)


def _collectives(made: Any, layout: Any, dump: str = "") -> tuple[list[Row], str, int]:
    """The collectives, why they are not known, and the messages that hosts pass between slices."""
    from autopar.runtime.verify.jax import counting

    try:
        text = _dumped(dump) if dump else made.as_text()
    except Exception as error:  # jaxlib cannot print every module of a newer libtpu
        why = str(error).splitlines()[0][:_SHOWN]
        return [], f"the compiled module cannot be read: {why}", 0
    try:
        rows = counting.collectives(text, layout.mesh, scatters=layout.settings.scatters)
        return rows, "", len(_BETWEEN_SLICES.findall(text))
    except NotImplementedError as error:
        return [], str(error), 0


def _dumped(dump: str) -> str:
    """The module that libtpu wrote: of those that a process compiles, the step's is the largest."""
    files = list(Path(dump).glob("*-TLP-hlo.txt"))
    if not files:
        raise FileNotFoundError("libtpu wrote no module")
    return max(files, key=lambda file: file.stat().st_size).read_text()


def _compiler(target: Described) -> str:
    return f"XLA of jaxlib {version('jaxlib')}" if target.platform == "cpu" else _libtpu()


def _libtpu() -> str:
    return f"libtpu {version('libtpu')}"


if __name__ == "__main__":
    made = main(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(made))
