"""What playing a JAX pipeline costs beside its jitted calls, and what it keeps between them.

    python -m benchmarks.jax_stage_calls [--rounds 20] [--json]

A GPT on four stages of two virtual devices under 1F1B and zb-h1. ``step``: a step of the emitted
program beside the same calls written out by hand, in turns, with the program beside itself as the
noise. ``action``: CPU time of an action where jitted calls give what they gave before, transfers
included. ``live``: the most bytes of arrays alive at once beside the state, the batch and gradients
so far, over those of what the schedule holds then.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from benchmarks.figures import Target, show

DEVICES = 8
CHILD = "AUTOPAR_JAX_STAGE_CALLS"
MODEL = "benchmarks/jax_pipelined_models.py:gpt"
SCHEDULES = ("1f1b", "zb-h1")
STEP, ACTION_S, LIVE = 1.05, 0.25e-3, 0.02


def pipeline(schedule: str) -> tuple[Any, Any, Any]:
    """A pipeline with its state and a cut batch."""
    from autopar.emit.jax import emit
    from autopar.frontends.jax.capture import capture_workload
    from autopar.planner.planning import plan_captured
    from autopar.runtime.jax.programs import pipeline_alone
    from benchmarks.jax_memory import roomy
    from benchmarks.jax_pipelined_models import gpt

    fix = {"pp": "4", "tp": "2", "schedule": schedule, "microbatch": "1", "recompute": "none"}
    captured = capture_workload(gpt)
    made = plan_captured(captured, gpt, roomy(), MODEL, fix)
    step = pipeline_alone(emit(made.lowered, made.plan, captured), gpt)
    params = _parameters(gpt, captured)
    state = step.initial(lambda layout: layout.gather_names(params))
    return step, state, step.cut(gpt.batch(0))


def _parameters(workload: Any, captured: Any) -> Any:
    import jax

    from autopar.runtime.jax.parallel import by_name, paths_of

    return by_name(paths_of(workload.init(jax.random.key(0))), captured.stacks)


def by_hand(step: Any) -> Callable[[Any, Any], Any]:
    """A chain of stages, one a place: the calls of `Pipeline.gradients` with nothing between."""
    import jax

    stages, last = step.stages, len(step.stages) - 1
    order = [(action.stage, action.kind, action.microbatch) for action in step.actions]
    names = {way.giver: way.value for way in step.ways}

    def run(state: Any, batch: Any) -> Any:
        held = _held(step, state)
        so_far = [stage.nothing(held[n]) for n, stage in enumerate(stages)]
        values: list[deque[Any]] = [deque() for _ in stages]
        back: list[deque[Any]] = [deque() for _ in stages]
        kept: list[deque[Any]] = [deque() for _ in stages]
        later: list[deque[Any]] = [deque() for _ in stages]
        losses = []
        for n, kind, i in order:
            stage = stages[n]
            if kind == "F":
                given = {names[n - 1]: values[n].popleft()} if n else {}
                made, lost, residual = stage.forward(held[n], batch[n], i, given)
                kept[n].append(({name: given[name] for name in stage.needed}, residual))
                if n < last:
                    x = jax.device_put(made[names[n]], stages[n + 1].sharding)
                    values[n + 1].append(x)
                else:
                    losses.append(lost["loss"])
            elif kind == "W":
                own, residual, between = later[n].popleft()
                so_far[n] = stage.backward_weight(
                    held[n], batch[n], i, own, residual, between, so_far[n]
                )
            else:
                coming = {names[n]: [back[n].popleft()]} if n < last else {}
                own, residual = kept[n].popleft()
                if kind == "B":
                    made, so_far[n] = stage.backward(
                        held[n], batch[n], i, own, residual, coming, so_far[n]
                    )
                else:
                    made, between = stage.backward_input(
                        held[n], batch[n], i, own, residual, coming
                    )
                    left = stage.pending((held[n], batch[n], i), (own, residual))
                    later[n].append((*left, between))
                if n:
                    x = jax.device_put(made[names[n - 1]], stages[n - 1].sharding)
                    back[n - 1].append(x)
        ends = [
            stage.summed(losses if n == last else [], so_far[n]) for n, stage in enumerate(stages)
        ]
        return ends[last][0], [gradients for _, gradients in ends]

    return run


def _held(step: Any, state: Any) -> dict[int, Any]:
    """What passes read, by stage."""
    apart = step.apart(state).items()
    return {n: {"params": own["params"], "frozen": own["frozen"]} for n, own in apart}


def timed(run: Callable[[], Any]) -> float:
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def row(schedule: str, rounds: int) -> dict[str, Any]:
    import jax

    step, state, batch = pipeline(schedule)
    hand = by_hand(step)
    for _ in range(2):
        ours, theirs = step.gradients(state, batch), hand(state, batch)
        jax.block_until_ready((ours, theirs))
    assert float(ours[0]) == float(theirs[0])
    runs = {
        "ours": lambda: step.gradients(state, batch),
        "hand": lambda: hand(state, batch),
        "again": lambda: step.gradients(state, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run))
    ratio = [a / b for a, b in zip(times["ours"], times["hand"], strict=True)]
    noise = [a / b for a, b in zip(times["ours"], times["again"], strict=True)]
    return {
        "schedule": schedule,
        "actions": len(step.actions),
        "step, by hand = 1": round(statistics.median(ratio), 3),
        "A against A": round(statistics.median(noise), 3),
        "action ms": round(1e3 * action_s(step, state, batch), 3),
        "live / held": round(live(step, state, batch), 4),
    }


def action_s(step: Any, state: Any, batch: Any, times: int = 20) -> float:
    """CPU seconds of an action without its jitted calls."""
    for stage in step.stages:
        for name in ("forward", "backward", "backward_input", "backward_weight", "nothing"):
            if hasattr(stage, name):
                _remember(stage, name)
    held = _held(step, state)
    step.player.play(held, batch)  # remembers
    begin = time.process_time()
    for _ in range(times):
        step.player.play(held, batch)
    spent = (time.process_time() - begin) / times / len(step.actions)
    for stage in step.stages:
        for name in [name for name in vars(stage) if name.startswith("jitted ")]:
            setattr(stage, name.removeprefix("jitted "), vars(stage).pop(name))
    return spent


def _remember(stage: Any, name: str) -> None:
    """Has a jitted call give what it gave the first time."""
    import jax

    function = getattr(stage, name)
    given: list[Any] = []

    def again(*arguments: Any) -> Any:
        if not given:
            copied = jax.tree.map(lambda x: x + 0, arguments[-1]) if "backward" in name else None
            given.append(
                function(*arguments) if copied is None else function(*arguments[:-1], copied)
            )
        return given[0]

    setattr(stage, f"jitted {name}", function)
    setattr(stage, name, again)


def live(step: Any, state: Any, batch: Any) -> float:
    """Bytes alive at the peak of a step over those that the schedule holds there."""
    import jax

    from autopar.runtime.jax.calls import Calls

    calls = Calls(step, step.apart(state), batch)
    jax.block_until_ready(step.gradients(state, batch))
    sizes = _sizes(step, calls)
    alive: list[int] = []
    hand_on = step.player.hand_on

    def counted(action: Any, made: Any, mail: Any) -> Any:
        done = hand_on(action, made, mail)
        moving = sum(array.nbytes for array in mail.values())
        alive.append(sum(array.nbytes for array in jax.live_arrays()) - moving)
        return done

    step.player.hand_on = counted
    base = sum(array.nbytes for array in jax.live_arrays())
    try:
        step.gradients(state, batch)
    finally:
        step.player.hand_on = hand_on
    base += sum(sizes["nothing", stage.number] for stage in step.stages)
    held = list(itertools.accumulate(sizes[a.kind, a.stage] for a in step.actions))
    peak = max(range(len(held)), key=held.__getitem__)
    return float((alive[peak] - base) / held[peak])


def _sizes(step: Any, calls: Any) -> dict[Any, int]:
    """Bytes that an action adds to what is held, by kind and stage."""
    import jax

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    played = Counter((action.stage, action.kind) for action in step.actions)
    sizes: dict[Any, int] = {}
    for stage in step.stages:
        n = stage.number
        known = {call.name: call for call in calls.of(stage, played)}
        back = known.get("backward") or known["backward_input"]
        kept = size(back.given[3:5])
        pending = size(known["backward_weight"].given[3:6]) if "backward_weight" in known else kept
        sizes |= {("F", n): kept, ("B", n): -kept, ("I", n): pending - kept, ("W", n): -pending}
        adds = known.get("backward") or known["backward_weight"]
        sizes["nothing", n] = size(adds.given[-1])
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if CHILD not in os.environ:  # the devices are asked for before jax is imported
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        env = {**os.environ, CHILD: "1", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        sys.exit(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.jax_stage_calls", *sys.argv[1:]], env=env
            ).returncode
        )
    rows = [row(schedule, given.rounds) for schedule in SCHEDULES]
    targets = [
        Target(
            "step beside the same calls by hand", max(r["step, by hand = 1"] for r in rows), STEP
        ),
        Target("CPU ms an action", max(r["action ms"] for r in rows), 1e3 * ACTION_S),
        Target(
            "live arrays beside those held, off by",
            max(abs(r["live / held"] - 1) for r in rows),
            LIVE,
        ),
    ]
    show(rows, targets, given.json)


if __name__ == "__main__":
    main()
