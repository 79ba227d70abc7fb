"""The whole page, or its pieces for a notebook."""

from __future__ import annotations

from autopar.nouns.axes import PIPELINE
from autopar.nouns.plan import Plan
from autopar.report.page.frontier import frontier_section
from autopar.report.page.html import Markup, joined, tag
from autopar.report.page.mesh import mesh_section, moved, moved_section
from autopar.report.page.over_time import over_time_section
from autopar.report.page.parts import memory_section, run_section, time_section
from autopar.report.page.shown import Shown
from autopar.report.page.style import STYLE
from autopar.report.page.tree import ops_section, tree_section
from autopar.report.summary import zero_text
from autopar.report.units import count, degrees, duration, percent, size

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is fetched, and no script runs."""


def render(of: Shown) -> str:
    """One HTML file that needs nothing else."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", _title(of)),
        tag("style", Markup("body{margin:0}")),
    )
    body = tag("body", Markup(fragment(of)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def fragment(of: Shown) -> str:
    """The same without a frame, as ``_repr_html_`` gives it; its style touches nothing else."""
    plan, cluster, predicted = of.plan, of.cluster, of.plan.prediction
    parts = [
        _headline(of),
        mesh_section(plan, cluster),
        time_section(plan),
        *([run_section(plan, of.run)] if of.run is not None else []),
        memory_section(plan),
        over_time_section(of.pipeline, predicted),
        moved_section(moved(plan, cluster, of.collectives), len(plan.stages)),
        frontier_section(plan),
        tree_section(of.lowered, zero_text(plan)),
        ops_section(of.ops, plan.prediction.step_time_s, len(plan.groups)),
    ]
    article = tag("article", joined(parts), class_="autopar")
    return tag("style", Markup(STYLE)) + article


def _title(of: Shown) -> str:
    return f"{of.plan.workload.rpartition('/')[2]} on {of.cluster.name}"


def _headline(of: Shown) -> Markup:
    plan, predicted = of.plan, of.plan.prediction
    memory = predicted.memory_bytes
    least, most = predicted.time_band_s
    facts = [
        ("step", duration(predicted.step_time_s), f"{duration(least)} to {duration(most)}"),
        ("memory", size(memory.total), f"{percent(memory.total / memory.limit)} of the device"),
        ("MFU", percent(predicted.mfu), f"{plan.style}, {plan.precision}"),
        ("devices", str(plan.device_count), of.cluster.device.name),
    ]
    if predicted.tokens_per_s is not None:
        each = f"{count(predicted.tokens_per_s / plan.device_count)} a device"
        facts.insert(2, ("tokens/s", count(predicted.tokens_per_s), each))
    shown = [
        tag("div", tag("span", name), tag("b", value), tag("span", more), class_="fact")
        for name, value, more in facts
    ]
    return tag(
        "header",
        tag("h1", _title(of)),
        tag("p", _choices(plan), class_="soft"),
        tag("div", *shown, class_="facts"),
    )


def _choices(plan: Plan) -> str:
    several = f", schedule {plan.schedule}" if plan.degrees[PIPELINE] > 1 else ""
    return (
        f"{degrees(plan.degrees)}, ZeRO {plan.each('zero')}, microbatches {plan.microbatches}, "
        f"recompute {plan.each('recompute')}, offload {plan.each('offload')}{several}, "
        f"{plan.optimizer}"
    )
