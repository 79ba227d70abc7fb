"""The report's page: its outline, names that are escaped, nothing from a network, its size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.files.cluster_file import load_cluster
from autopar.lowering.collectives import priced_collectives
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import RunnerUp, Stage
from autopar.pipeline.actions import Action
from autopar.planner.search.layouts import search_plan
from autopar.report.page import over_time
from autopar.report.page.frontier import NEAR, Point, _range, frontier
from autopar.report.page.html import VOID, Markup, tag
from autopar.report.page.mesh import level_of, moved
from autopar.report.page.over_time import over_time_section, stage_curve
from autopar.report.page.page import fragment, render
from autopar.report.page.shown import Shown, shown
from autopar.report.page.tree import model_tree
from autopar.report.revisit import revisit
from autopar.report.units import duration
from autopar.runtime.jobs.result import RunResult
from tests import plans
from tests.cli.test_cli import run
from tests.files.test_plan_checks import made
from tests.planner.graphs import gpt
from tests.planner.test_search import BATCH, LARGE, NODE, question

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
RUN = RunResult((2.5, 2.0), 0.15, 0.12, 8, 2, 100 << 20, {}, "resident", True)


def planned(fix: Mapping[str, str]) -> Shown:
    graph = gpt(layers=6, **{**LARGE, "b": 16})
    best = search_plan(question(graph, 16, NODE, fix)).best.decided
    plan = plans.plan(
        spreads=(best.spread,),
        stages=best.stages or (Stage(zero=best.layout.zero, recompute=best.layout.recompute),),
        microbatches=best.candidate.microbatches,
        schedule=best.schedule,
    )
    again = revisit(plan, NODE, graph, BATCH)
    stored = {name: tensor.dtype for name, tensor in graph.parameters()}
    rows = priced_collectives(again.lowered, plan, stored, clips=False)
    return shown(again, [asdict(row) for row in rows])


@pytest.fixture(scope="module")
def flat() -> Shown:
    return planned({"tp": "2"})


@pytest.fixture(scope="module")
def stages() -> Shown:
    return planned({"pp": "2", "tp": "2", "microbatch": "1", "schedule": "1f1b"})


class Reader(HTMLParser):
    """The headings and what opens, all text, and every element with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outline: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("h1", "h2", "h3", "summary"):
            self.outline.append(f"{tag} ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"h1", "h2", "h3"} & set(self.open) or self.open[-2:] == ["summary", "code"]:
            self.outline[-1] += data


OUTLINE = """\
h1 model.py:GPT on 8 H100
h2 Mesh on the cluster
h2 Time by part
h3 by phase
h2 Measured beside predicted
h2 Memory by part
h2 Memory over time
h2 Collectives by level
h2 Plans that lost
h2 Shardings on the model
summary norm
summary layers.0 … 5
summary ln_1
summary ln_2
h2 What each op does"""


def test_the_outline_of_a_page(flat: Shown) -> None:
    forward = replace(flat.plan.prediction, forward_time_s=0.04, optimizer_time_s=0.01)
    page = render(replace(flat, plan=replace(flat.plan, prediction=forward), run=RUN))
    read = Reader(page)
    assert not read.open
    outline = "\n".join(line.strip() for line in read.outline)
    assert outline.split("h2 What")[0] == OUTLINE.split("h2 What")[0]
    for expected in (
        "120 ms",
        "128 MiB",
        "17.1k",
        "150 ms",
        "1.25",
        "6 x layers.*",
        "limit 1.00 GiB, far above",
    ):
        assert any(expected in word for word in read.words), expected


def test_a_pipeline_has_lanes_and_stages(stages: Shown) -> None:
    read = Reader(render(stages))
    lanes = [a for name, a in read.elements if name == "svg" and a.get("class") == "lane"]
    assert len(lanes) == 2
    actions = sum(1 for name, _ in read.elements if name == "rect")
    assert actions == len(stages.pipeline.schedule.actions)
    assert "1f1b" in "".join(read.words)
    assert "of all 2 pipeline ranks together" in "".join(read.words)


def test_nothing_is_fetched_and_nothing_runs(flat: Shown, stages: Shown) -> None:
    for page in (render(flat), render(stages)):
        read = Reader(page)
        assert not {"script", "link", "img", "iframe", "object"} & {n for n, _ in read.elements}
        for _, attributes in read.elements:
            assert not {"src", "href"} & set(attributes)
            assert not any(name.startswith("on") for name in attributes)
        for reference in ("http:", "https:", "url(", "@import", "@font-face"):
            assert reference not in page
        assert len(page.encode()) < 100_000
        assert page == render(flat) or page == render(stages)
        assert Markup(fragment(flat)) in render(flat)


def test_names_are_escaped_wherever_they_come_from(flat: Shown) -> None:
    bad = "<script>alert('&')</script>"
    lost = RunnerUp({"tp": 8}, None, None, 1, 0.2, 1 << 20, bad)
    level = replace(NODE.levels[0], name=bad)
    plan = replace(flat.plan, workload=bad, runners_up=(lost,), optimizer=bad)
    ops = [replace(row, key=f"{bad}::{bad}", strategy=bad) for row in flat.ops]
    cluster = replace(NODE, name=bad, levels=(level,))
    page = render(replace(flat, plan=plan, ops=ops, cluster=cluster))
    read = Reader(page)
    assert "script" not in {name for name, _ in read.elements}
    assert "".join(read.words).count(bad) >= 8
    assert tag("a", "<", title='"<"') == '<a title="&quot;&lt;&quot;">&lt;</a>'


def test_many_actions_make_a_page_of_the_same_order(stages: Shown) -> None:
    from autopar.pipeline.schedules.table import schedule

    many = schedule("1f1b", 2, 1600, 1)
    priced = stages.pipeline
    longer = replace(priced, schedule=many, timeline=priced.prices.play(priced.runs, many))
    page = render(replace(stages, pipeline=longer))
    assert "Drawn: the first" in page
    assert len(page.encode()) < 300_000


def test_what_one_stage_keeps_rises_and_is_gone_where_the_optimizer_begins(flat: Shown) -> None:
    predicted = plans.prediction(step_time_s=0.1, forward_time_s=0.03, optimizer_time_s=0.01)
    curve, count = stage_curve(flat.pipeline, predicted)
    assert count == flat.plan.microbatches
    assert curve[0][1] == curve[-1][1] == 0
    assert [t for t, _ in curve] == sorted(t for t, _ in curve)
    assert curve[-1][0] == pytest.approx(0.09)
    units = len(flat.pipeline.prices.model.units)
    turn = max(range(2 * units), key=lambda i: curve[i][1])
    assert curve[turn][0] == pytest.approx(0.03 / count)
    untold, _ = stage_curve(flat.pipeline, plans.prediction(step_time_s=0.1))
    assert untold[-1][0] == pytest.approx(0.1)
    prices = flat.pipeline.prices
    saved = [
        prices.model.stage_summary(i, i + 1).lives[prices.recompute.policy].saved
        for i in range(len(prices.model.units))
    ]
    assert max(held for _, held in curve) == sum(saved) > 0


def test_the_axis_of_time_ends_with_the_step(
    flat: Shown, stages: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = stages.pipeline.timeline.step_s
    predicted = plans.prediction(step_time_s=max(0.12, 1.5 * longest))
    for one in (flat, stages):
        text = str(over_time_section(one.pipeline, predicted))
        (end,) = re.findall(r'<div class="ends"><span>0</span><span>(.*?)</span></div>', text)
        assert end == duration(predicted.step_time_s)
    lanes = re.findall(r'<rect class="\w+"[^>]* x="(\d+)" y="2" width="(\d+)"', text)
    assert max(int(x) + int(width) for x, width in lanes) <= 7_000  # the optimizer comes last
    actions = tuple(Action(0, kind, m) for m in range(64) for kind in ("F", "B"))
    schedule = replace(flat.pipeline.schedule, route=(0,) * 64, lists=(actions,))
    monkeypatch.setattr(over_time, "MOST_POINTS", 10)
    part = str(over_time_section(replace(flat.pipeline, schedule=schedule), predicted))
    assert f"the first 4 of 64 microbatches of a step of {duration(predicted.step_time_s)}" in part


def test_on_a_phone_names_break_before_they_push_numbers_off_the_screen(flat: Shown) -> None:
    """Numbers keep their line; of all else in tables no more than 18 letters must stay together,
    so that five columns have room on 360 points."""
    rows = [
        {
            "kind": "reduce_scatter",
            "axis": "dp_shard+tp",
            "count": 8,
            "size_bytes": 1 << 30,
        }
    ]
    page = render(replace(flat, collectives=rows))
    cells = re.findall(r'<td(?: class="(\w)")?>(.*?)</td>', page)
    names = [text for kind, text in cells if kind != "n"]
    assert any("reduce_<wbr>scatter<wbr>(dp_<wbr>shard+tp)" in text for text in names)
    for text in names:
        plain = re.sub(r"<(?!wbr)[^>]*>", " ", text)
        assert max(map(len, re.split(r"<wbr>|[ -]", plain))) <= 18, text
    assert ".autopar td code{overflow-wrap:anywhere}" in page.partition("@media(max-width")[2]


def test_collectives_are_of_the_level_that_they_cross(stages: Shown) -> None:
    cluster = load_cluster(CLUSTERS / "h100_8x8.yaml")
    mesh = Mesh(("pp", "dp_replicate", "dp_shard", "tp"), (2, 2, 4, 4))
    names = {axis: level_of(cluster, mesh, axis).name for axis in mesh.axes}
    inner, outer = (level.name for level in cluster.levels)
    assert names == {"pp": outer, "dp_replicate": outer, "dp_shard": outer, "tp": inner}
    assert level_of(cluster, Mesh(("pp", "tp"), (16, 4)), "pp").name == inner
    assert level_of(cluster, mesh, "dp_shard+tp").name == outer
    rows = moved(stages.plan, NODE, stages.collectives)
    ranks = {row["rank"] for row in stages.collectives}
    totals = [
        sum(r["count"] * r["size_bytes"] for r in stages.collectives if r["rank"] == rank)
        for rank in ranks
    ]
    assert sum(row.size_bytes for row in rows) == max(totals)


def test_every_parameter_stands_in_the_tree_once(flat: Shown) -> None:
    top = model_tree(flat.lowered)
    open_now, leaves = [top], 0
    while open_now:
        node = open_now.pop()
        leaves += len(node.parameters)
        open_now += node.inside.values()
    bodies = [flat.lowered, *flat.lowered.blocks.values()]
    roles = [t.tensor.role for body in bodies for t in body.tensors.values()]
    assert leaves == roles.count("parameter")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_none_beats_the_frontier(drawn: list[tuple[int, int]]) -> None:
    points = [Point(str(i), float(t), float(m)) for i, (t, m) in enumerate(drawn)]
    kept = frontier(points)
    for point in points:
        assert any(
            k.step_time_s <= point.step_time_s and k.memory_bytes <= point.memory_bytes
            for k in kept
        )
    for one, two in pairwise(kept):
        assert one.step_time_s < two.step_time_s
        assert one.memory_bytes > two.memory_bytes


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path)
    page, measured = tmp_path / "report.html", tmp_path / "run.json"
    words = ("report", str(folder), "-o", str(page))
    assert run(*words, monkeypatch=monkeypatch) == 0
    assert "kB; open it in a browser" in capsys.readouterr().err
    plain = page.read_text()
    assert "Measured beside predicted" not in plain
    measured.write_text(json.dumps({**asdict(RUN), "predicted_memory_bytes": 1}))
    assert run(*words, "--run", str(measured), monkeypatch=monkeypatch) == 0
    assert "Measured beside predicted" in page.read_text()
    for wrong, expected in (
        (("--run", str(tmp_path / "none.json")), "No such file"),
        (("--run", str(page)), "is not what a run prints; write it with"),
        (("-o", str(tmp_path)), "is a folder; give a file"),
        (("-o", str(tmp_path / "no" / "r.html")), "make it first"),
    ):
        capsys.readouterr()
        assert run("report", str(folder), *wrong, monkeypatch=monkeypatch) == 2
        assert expected in capsys.readouterr().err


@given(st.lists(st.floats(1, 200), min_size=1, max_size=6))
def test_all_that_is_plotted_lies_in_the_plot(sizes: list[float]) -> None:
    low, top = _range(sizes, 100)
    assert all(low <= size < top for size in sizes)
    assert (top > 100) == (max(sizes) >= NEAR * 100)
