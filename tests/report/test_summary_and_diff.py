"""The summary states every figure of the plan; a diff states everything that differs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.nouns.batch import BatchEntry
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Fingerprints
from autopar.report.diff import Change, decisions, diff, diff_object, gap, strategies
from autopar.report.parts import time_parts
from autopar.report.render import to_text
from autopar.report.summary import summary, summary_object
from tests import plans


def test_summary_states_every_figure() -> None:
    text = to_text(summary(plans.plan(), plans.cluster()))
    for stated in (
        "model.py:GPT on a toy",
        "4 used of 4 x toy",
        "dp_shard 2 x tp 2",
        "ZeRO 2: optimizer state and gradients",
        "120 ms",
        "100 ms, 16.7 % below",
        "17.1k tokens/s",
        "25.0 %",
        "128 MiB",
        "1.00 GiB",
        "12.5 %",
        "150 ms",
        "25 ms more of gathers than it saves",
    ):
        assert stated in text, f"{stated!r} is missing from\n{text}"


def test_summary_shows_bands_with_what_they_cover_and_notes() -> None:
    text = to_text(summary(plans.plan(), plans.cluster(), ["Devices differ."]))
    assert "120 ms, band 100 ms to 144 ms" in text
    assert "band 104 MiB to 152 MiB, which covers" in text
    assert "none on a toy" in text
    assert "Mind\n  Devices differ." in text


def test_summary_says_what_its_times_rest_on() -> None:
    text = to_text(summary(plans.plan(), plans.cluster()))
    assert re.search(r"rests on\s+\d+ (assumed|fitted), .*figures; toy: no source given", text)


def test_summary_without_tokens_and_with_replicated_ops() -> None:
    plan = plans.plan(
        prediction=plans.prediction(tokens_per_s=None), replicated_ops=("fancy",), runners_up=()
    )
    text = to_text(summary(plan, plans.cluster()))
    assert "tokens/s" not in text
    assert "Plans that lost" not in text
    assert "Kept whole on every device, as asked: fancy" in text


def test_summary_object_has_what_the_design_promises() -> None:
    data = summary_object(plans.plan(), {"capture": 1.0, "search": 2.0}, ["fancy"])
    assert data["degrees"] == {
        "dp_replicate": 1, "dp_shard": 2, "tp": 2, "cp": 1, "ep": 1, "pp": 1
    }  # fmt: skip
    assert data["step_time_s"] == 0.120
    assert data["lower_bound_s"] == 0.100
    assert data["tokens_per_s"] == 17_066.7
    assert data["mfu"] == 0.25
    assert data["microbatches"] == 1
    assert data["schedule"] == "none"
    assert data["memory_bytes"]["total"] == 128 << 20
    assert sum(data["memory_bytes"][part] for part in _PARTS) == data["memory_bytes"]["total"]
    assert data["memory_bytes"]["limit"] == 1 << 30
    assert data["search_time_s"] == {"capture": 1.0, "search": 2.0}
    assert data["unruled_ops"] == ["fancy"]
    (lost,) = data["runners_up"]
    assert lost["recompute"] == "none"
    assert data["time_band_s"] == [0.100, 0.144]
    assert data["memory_band_bytes"] == [104 << 20, 152 << 20]
    assert lost["reason"] == "25 ms more of gathers than it saves"


_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def test_equal_plans_do_not_differ() -> None:
    assert decisions(plans.plan(), plans.plan()) == []
    assert strategies(plans.plan(), plans.plan()) == []
    text = to_text(diff(plans.plan(), plans.plan()))
    assert "Both plans decide the same." in text
    assert text.count("same") == 12  # six predicted quantities, five parts of memory


def test_diff_names_what_changed_with_both_sides() -> None:
    before = plans.plan()
    spread = replace(
        before.spreads[0],
        mesh=Mesh(("tp",), (4,)),
        ops={"block::up/linear": "tp:n", "block::norm/layer_norm": "tp:s"},
        parameters={},
    )
    after = plans.plan(
        spreads=(spread,),
        stages=(replace(before.stages[0], zero=0),),
        prediction=plans.prediction(step_time_s=0.09, lower_bound_s=0.08),
    )
    assert {c.what: (c.before, c.after) for c in decisions(before, after)} == {
        "degrees": ("dp_shard 2 x tp 2", "tp 4"),
        "ZeRO": ("2", "0"),
    }
    assert {c.what: (c.before, c.after) for c in strategies(before, after)} == {
        "block::down/linear": ("tp:k", "whole"),
        "block::norm/layer_norm": ("whole", "tp:s"),
        "block::up.weight": ("tp:S0", "R"),
    }
    text = to_text(diff(before, after, ("old", "new")))
    for stated in ("old", "new", "Decisions (2 differ)", "Strategies (3 differ)", "-25.0 %"):
        assert stated in text
    data = diff_object(before, after)
    assert data["step_time_s"] == [0.120, 0.09]
    assert data["decisions"] == {"degrees": ["dp_shard 2 x tp 2", "tp 4"], "ZeRO": ["2", "0"]}


def test_diff_names_clusters_and_what_differs_between_them() -> None:
    here = plans.cluster()
    there = replace(here, name="another", levels=(replace(here.levels[0], latency_s=2e-4),))
    one = plans.plan(fingerprints=Fingerprints("m", here.fingerprint, "built-in", "t"))
    two = plans.plan(fingerprints=Fingerprints("m", there.fingerprint, "built-in", "t"))
    assert {c.what: (c.before, c.after) for c in decisions(one, two, (here, there))} == {
        "cluster": ("a toy", "another"),
        "cluster links": ("wire 4 at 1 GB/s, 100 us", "wire 4 at 1 GB/s, 200 us"),
    }
    # Where nothing that a reader knows a cluster by differs, the figures that do; where a folder
    # does not say, fingerprints.
    figures = replace(here, levels=(replace(here.levels[0], contention=0.5),))
    three = plans.plan(fingerprints=Fingerprints("m", figures.fingerprint, "built-in", "t"))
    (only,) = decisions(one, three, (here, figures))
    assert only == Change("cluster levels[0].contention", "0", "0.5")
    (only,) = decisions(one, three)
    assert only == Change("cluster", here.fingerprint, figures.fingerprint)


def batch(samples: int, length: int = 128) -> tuple[BatchEntry, ...]:
    return (BatchEntry("tokens", (samples, length), "int64", 0),)


def test_diff_of_steps_of_other_batches_says_so_and_gives_times_by_sample() -> None:
    one = plans.plan(prediction=plans.prediction(step_time_s=0.120))
    two = plans.plan(prediction=plans.prediction(step_time_s=0.100))
    batches = batch(64), batch(16)
    (only,) = decisions(one, two, batches=batches)
    sides = "64 samples: tokens [64, 128]", "16 samples: tokens [16, 128]"
    assert only == Change("global batch", *sides)
    text = to_text(diff(one, two, ("old", "new"), batches=batches), 200)
    assert re.search(r"time by sample +1.88 ms +6.25 ms +\+233 %", text), text
    assert "A step of old has 64 samples and one of new 16: times by sample compare" in text
    assert diff_object(one, two, batches=batches)["global_batch"] == [64, 16]
    longer = to_text(diff(one, two, ("old", "new"), batches=(batch(64), batch(64, 256))), 200)
    assert "time by sample" not in longer
    assert "Steps of old and new are of batches whose samples have other sizes" in longer
    for same in ((batch(64), batch(64)), (batch(64), None), (None, None)):
        alike = to_text(diff(one, two, ("old", "new"), batches=same), 200)
        assert "compare" not in alike
        assert "sample" not in alike


def test_diff_of_two_models_names_both() -> None:
    other = plans.plan(workload="../other.py:GPT", fingerprints=Fingerprints("n", "c", "p", "t"))
    (only,) = decisions(plans.plan(), other)
    assert only == Change("model", "model.py:GPT (m)", "other.py:GPT (n)")


def test_diff_says_which_parts_the_gap_is_made_of() -> None:
    slow = plans.prediction(step_time_s=0.150, waiting_time_s=0.01)
    sizes = plans.memory(total=148 * plans.MIB, activations=80 * plans.MIB)
    fast = plans.prediction(
        step_time_s=0.110, exposed_communication_s=0.010, waiting_time_s=0.01, memory_bytes=sizes
    )
    for predicted in (slow, fast):
        assert sum(time_parts(predicted).values()) == pytest.approx(predicted.step_time_s)
        parts = predicted.memory_bytes.parts()
        assert sum(parts.values()) == predicted.memory_bytes.total
    one, two = plans.plan(prediction=slow), plans.plan(prediction=fast)
    because = [
        "optimizer and the rest takes 20.0 ms less",
        "communication not hidden takes 20.0 ms less",
        "20.0 MiB more of activations",
    ]
    assert sorted(gap(one, two)) == sorted(because)
    assert gap(one, one) == []
    text = to_text(diff(one, two, ("old", "new")))
    assert text.endswith("".join(f"  new: {why}\n" for why in gap(one, two)))
    assert re.search(r"  activations +60.0 MiB +80.0 MiB +\+33.3 %", text)
    assert "waiting" in text
