"""Why a pipeline is cut and ordered as it is: its stages, its ranks, and cuts one unit off."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.pricing.pipeline import runs_of
from autopar.pricing.planned import PricedPipeline
from autopar.pricing.sends import Ends, pairs_of
from autopar.report.render import indented, table
from autopar.report.units import duration, size


def explain_pipeline(priced: PricedPipeline) -> list[RenderableType]:
    """Stages with what they take; ranks with bubble and memory; what other cuts would take."""
    took = f"\nRanks in {duration(priced.timeline.step_s)} of schedule"
    return [
        *_devices(priced),
        Text(f"Stages under {priced.schedule.name}, times of one microbatch", style="bold"),
        indented(_stages(priced)),
        Text(f"{took}, behind which the optimizer steps", style="bold"),
        indented(_ranks(priced)),
        *_cuts(priced),
        Text(""),
    ]


def _stages(priced: PricedPipeline) -> RenderableType:
    numbers = ("stage", "rank", "units", "forward", "backward", "sends", "keeps", "ZeRO")
    rows = table(*numbers[:2], "from", *numbers[2:], "recompute", right=numbers)
    sends_s = _sends_s(priced)
    for stage, (first, end) in enumerate(priced.runs):
        prices = priced.prices.at(stage)
        time = prices.time(first, end)
        rows.add_row(
            str(stage),
            str(priced.schedule.ranks[stage]),
            prices.model.units[first],
            str(end - first),
            duration(time.forward_s),
            duration(time.backward_s),
            duration(sends_s[stage]),
            size(priced.prices.saved_bytes(stage, first, end)),
            str(prices.state.zero),
            str(prices.recompute),
        )
    return rows


def _ranks(priced: PricedPipeline) -> RenderableType:
    columns = ("rank", "computes", "idle", "memory")
    rows = table(*columns, right=columns)
    memories = priced.prices.memory(priced.runs, priced.schedule)
    for rank, (busy_s, memory) in enumerate(zip(priced.timeline.busy_s, memories, strict=True)):
        idle = 1 - busy_s / priced.timeline.step_s
        rows.add_row(str(rank), duration(busy_s), f"{idle:.1%}", size(memory.total))
    return rows


def _devices(priced: PricedPipeline) -> list[RenderableType]:
    """How fast each kind of devices is, where there are several."""
    kinds = kinds_of(priced)
    if len(kinds) < 2:
        return []
    numbers = ("ranks", "speed", "units")
    rows = table("devices", "ranks", "a microbatch", "speed", "units", right=numbers)
    for kind in kinds:
        rows.add_row(
            kind["device"],
            str(kind["ranks"]),
            duration(kind["pass_s"]),
            f"{kind['speed']:.2f}",
            f"{kind['units']:.4g}",
        )
    why = "Devices: all of the model's microbatch on one rank, and units that a rank has"
    slowest = priced.prices.cluster.device.name
    ops = f"Ops below the cuts are priced on {slowest}, the slowest."
    return [Text(why, style="bold"), indented(rows), indented(Text(ops)), Text("")]


def _cuts(priced: PricedPipeline) -> list[RenderableType]:
    others = other_cuts(priced)
    if not others:
        return []
    rows = table("cut", "one unit", "step", right=("step",))
    for row in others:
        rows.add_row(row["cut"], row["moved"], row["says"])
    return [Text("\nCuts one unit off", style="bold"), indented(rows)]


def kinds_of(priced: PricedPipeline) -> list[dict[str, Any]]:
    """Of each kind of ranks: its device; how many ranks; seconds of all of the model's forward and
    backward on one of them, and how fast that is beside the slowest; units that a rank has in the
    mean."""
    prices, schedule = priced.prices, priced.schedule
    views = [prices.view(rank) for rank in range(len(schedule.lists))]
    held = [0] * len(views)
    for stage, (first, end) in enumerate(priced.runs):
        held[schedule.ranks[stage]] += end - first
    rows: list[dict[str, Any]] = []
    for view in dict.fromkeys(views):
        own = [count for count, other in zip(held, views, strict=True) if other == view]
        time = prices.on(view).time(0, len(prices.model.units))
        rows.append(
            {
                "device": view.device.name,
                "ranks": len(own),
                "pass_s": time.forward_s + time.backward_s,
                "units": sum(own) / len(own),
            }
        )
    slowest_s = max(row["pass_s"] for row in rows)
    return [{**row, "speed": slowest_s / row["pass_s"]} for row in rows]


def _sends_s(priced: PricedPipeline) -> list[float]:
    """Of every stage, what it sends forward of one microbatch."""
    schedule = priced.schedule
    sent = priced.prices.sent(priced.runs, schedule)
    seconds = [0.0] * len(schedule.ranks)
    for route in schedule.routes:
        for a, b in pairs_of(len(route), sent.skips):
            if schedule.ranks[route[a]] != schedule.ranks[route[b]]:
                pair = min(route[a], route[b]), max(route[a], route[b])
                seconds[route[a]] += float(sent.between(schedule, [pair])[0, 0])
    return seconds


def other_cuts(priced: PricedPipeline) -> list[dict[str, Any]]:
    """The step with each cut one unit earlier or later, and whether it fits."""
    rows = []
    units = priced.prices.model.units
    for i in range(len(priced.ends) - 1):
        for step, word in ((-1, "earlier"), (1, "later")):
            ends = _moved(priced.ends, i, step)
            if ends is None:
                continue
            runs = runs_of(ends, priced.schedule)
            again = priced.prices.play(runs, priced.schedule)
            over = max(m.total - m.limit for m in priced.prices.memory(runs, priced.schedule))
            more_s = again.step_s - priced.timeline.step_s
            says = f"{duration(abs(more_s))} {'more' if more_s >= 0 else 'less'}"
            if over > 0:
                says += f", does not fit by {size(over)}"
            rows.append(
                {
                    "cut": f"before {units[priced.ends[i]]}",
                    "moved": word,
                    "more_s": more_s,
                    "fits": over <= 0,
                    "says": says,
                }
            )
    return rows


def _moved(ends: Ends, i: int, step: int) -> Ends | None:
    before = ends[i - 1] if i else 0
    if not before < ends[i] + step < ends[i + 1]:
        return None
    return (*ends[:i], ends[i] + step, *ends[i + 1 :])


def pipeline_object(priced: PricedPipeline) -> dict[str, Any]:
    """The same as JSON-like values."""
    memories = priced.prices.memory(priced.runs, priced.schedule)
    return {
        "schedule": priced.schedule.name,
        "step_time_s": priced.timeline.step_s,
        "bubble": priced.timeline.bubble,
        "stages": [
            {
                "rank": priced.schedule.ranks[stage],
                "first": priced.prices.model.units[first],
                "units": end - first,
                "zero": priced.prices.at(stage).state.zero,
                "recompute": str(priced.prices.at(stage).recompute),
                "forward_s": priced.prices.at(stage).time(first, end).forward_s,
                "backward_s": priced.prices.at(stage).time(first, end).backward_s,
            }
            for stage, (first, end) in enumerate(priced.runs)
        ],
        "devices": kinds_of(priced),
        "ranks": [
            {"busy_s": busy_s, "memory_bytes": memory.total}
            for busy_s, memory in zip(priced.timeline.busy_s, memories, strict=True)
        ],
        "cuts": [
            {k: row[k] for k in ("cut", "moved", "more_s", "fits")} for row in other_cuts(priced)
        ],
    }
