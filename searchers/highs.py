"""HiGHS in a process of its own, which can be stopped at any moment.

Inside this process a solve could be stopped by nothing but its own time limit: Ctrl-C would wait
for it, and so would a limit that HiGHS overruns while it presolves.  The child is started on the
first solve and kept for the next; whatever ends a solve early kills it.  Requests and answers are
pickles, each after its length; what HiGHS prints, whatever it is told, goes nowhere.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

GRACE_S = 0.5
"""Seconds beyond a time limit after which the child is killed."""
START_S = 2.0
"""The same for a child that has to be started first."""
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    """A program (a serialised MathOpt ``ModelProto``) and how far to go with it.

    ``hint`` lists the columns that are one in a good answer; ``columns`` counts the leading columns
    whose values are wanted.
    """

    program: bytes
    columns: int
    limit_s: float
    nodes: int | None
    relative_gap: float
    absolute_gap: float
    seed: int
    hint: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """``status`` is "optimal", "infeasible" or "stopped"; ``bound`` in the program's units.

    ``nodes`` counts those of branch and bound.
    """

    status: str
    bound: float
    values: npt.NDArray[np.float64] | None
    nodes: int = 0


STOPPED = Answer("stopped", -math.inf, None)

_child: subprocess.Popen[bytes] | None = None


def solve(request: Request) -> Answer:
    """Solve a program, or stop at its limit; a KeyboardInterrupt takes effect at once."""
    global _child
    grace = GRACE_S
    if not running():
        _child, grace = _start(), START_S
    child = _child
    assert child is not None
    assert child.stdin is not None
    assert child.stdout is not None
    done = False
    try:
        _write(child.stdin, request)
        ready, _, _ = select.select([child.stdout], [], [], request.limit_s + grace)
        answer = _read(child.stdout) if ready else None
        done = answer is not None
    except BrokenPipeError:
        return STOPPED
    finally:
        if not done:
            stop()
    return answer if isinstance(answer, Answer) else STOPPED


def running() -> bool:
    """Whether there is a child, waiting for a program."""
    return _child is not None and _child.poll() is None


def stop() -> None:
    """End the child; the next solve starts another."""
    global _child
    if _child is not None:
        _child.kill()
        _child.wait()
        for pipe in (_child.stdin, _child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was not sent is not wanted any more
                    pass
        _child = None


def _start() -> subprocess.Popen[bytes]:
    atexit.register(stop)
    return subprocess.Popen(
        [sys.executable, "-c", "from autopar.searchers.highs import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _write(pipe: IO[bytes], message: object) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    """The next message, or None at the end."""
    head = pipe.read(LENGTH.size)
    return pickle.loads(pipe.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def serve() -> None:
    """The child: answers requests from stdin until that ends."""
    # Ctrl-C reaches the whole group of processes; whether to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while (request := _read(sys.stdin.buffer)) is not None:
        _write(answers, _solve_here(request))


def _solve_here(request: Request) -> Answer:
    import time
    from datetime import timedelta

    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    began = time.perf_counter()
    model = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(request.program))
    left = max(request.limit_s - (time.perf_counter() - began), 0.01)
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=left),
        node_limit=request.nodes,
        relative_gap_tolerance=request.relative_gap,
        absolute_gap_tolerance=request.absolute_gap,
        random_seed=request.seed,
    )
    start = mathopt.ModelSolveParameters()
    if request.hint:
        values = {model.get_variable(i): 1.0 for i in request.hint}
        start.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=start)
    reason = result.termination.reason
    bound = result.termination.objective_bounds.dual_bound
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return Answer("infeasible", math.inf, None)
    if not result.has_primal_feasible_solution():
        return Answer("stopped", bound, None)
    nodes = max(int(result.solve_stats.node_count), 0)
    wanted = [model.get_variable(i) for i in range(request.columns)]
    status = "optimal" if reason == mathopt.TerminationReason.OPTIMAL else "stopped"
    return Answer(status, bound, np.array(result.variable_values(wanted)), nodes)
