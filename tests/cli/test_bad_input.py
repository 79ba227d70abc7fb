"""Everything that a user can get wrong: one message with the numbers, exit code 2 or 3."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import app as cli
from autopar.cli import commands
from autopar.cli.explaining import explanation
from autopar.files.plan_folder import read_plan
from autopar.rules.implementations.table import LOCAL_GROUPS
from autopar.rules.implementations.table import TABLE as ROWS
from autopar.runtime.jobs import launch
from tests.plans import cluster_text

Run = Callable[..., tuple[int, str]]

CLUSTER = cluster_text(4)
MODEL = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    import autopar

    def batch():
        return {"x": torch.zeros(8, 16), "y": torch.zeros(8, dtype=torch.long)}

    @autopar.parallelize(batch=batch)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 32)
            self.outer = nn.Linear(32, 4)

        def forward(self, x, y):
            return F.cross_entropy(self.outer(F.relu(self.inner(x))), y)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in ``tmp_path`` with the files given; (exit code, the message)."""

    def call(*words: str, model: str = MODEL, cluster: str = CLUSTER) -> tuple[int, str]:
        (tmp_path / "model.py").write_text(textwrap.dedent(model))
        (tmp_path / "cluster.yaml").write_text(textwrap.dedent(cluster))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["autopar", *words])
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        _, err = capsys.readouterr()
        return code, err.partition("autopar: ")[2]

    return call


PLAN = ("plan", "model.py", "--cluster", "cluster.yaml", "-o", "plan")


def test_the_model_that_the_others_break_is_planned(run: Run, tmp_path: Path) -> None:
    assert run(*PLAN) == (0, "")
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["workload"] == "../model.py"


def changed(old: str, new: str, text: str = MODEL) -> str:
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    return text.replace(old, new)


def wrong(name: str, model: str, *parts: str, code: int = 2) -> object:
    return pytest.param(model, parts, code, id=name)


@pytest.mark.parametrize(
    ("model", "parts", "code"),
    [
        wrong("no model", "x = 1", "model.py has no model", "@autopar.parallelize"),
        wrong(
            "two models",
            MODEL + "\n    other = autopar.Workload(model=Model, batch=batch)\n",
            "2 models, Model, other",
            "model.py:Model",
        ),
        wrong("syntax error", "def f(:", "model.py:1:"),
        wrong("error in the file", "x = 1\ny = x / 0", "model.py:2: ZeroDivisionError"),
        wrong(
            "no scalar",
            changed("F.cross_entropy(", "(", changed("(self.inner(x))), y)", "(self.inner(x))))")),
            "scalar",
            "[8, 4]",
        ),
        wrong(
            "control flow",
            changed("return F", "if x.sum() > 0: x = -x\n            return F"),
            "model.py:18",
        ),
        wrong(
            "no gradient",
            changed("(F.relu(self.inner(x))), y)", "(F.relu(self.inner(x))).detach(), y)"),
            "no gradient flows from the loss to any parameter",
        ),
        wrong(
            "op without a rule",
            changed(
                "F.relu(self.inner(x))", "self.inner(x) + self.inner(x).kthvalue(3, 1, True).values"
            ),
            "It stands at Model (",
            "model.py:18",
            "register_rule('aten::kthvalue', 'a b! -> a ",
            "--allow-replicated",
        ),
        wrong(
            "empty batch",
            changed(
                'return {"x": torch.zeros(8, 16), "y": torch.zeros(8, dtype=torch.long)}',
                "return {}",
            ),
            "the batch is empty, not a dict of tensors",
        ),
        wrong("no samples", MODEL.replace("zeros(8", "zeros(0"), "the batch has no samples: dim 0"),
        wrong("no text", "x = 1\n\0", "model.py: ", "source code string cannot contain null bytes"),
    ],
)
def test_models_that_cannot_be_planned(
    run: Run, tmp_path: Path, model: str, parts: tuple[str, ...], code: int
) -> None:
    exit_code, message = run(*PLAN, model=model)
    assert (exit_code, [part for part in parts if part not in message]) == (code, []), message
    assert "Traceback" not in message
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param("count: 4", "count: 4, colour: red", "colour", id="unknown key"),
        pytest.param("1 GB/s", "1 parsec", "parsec", id="wrong unit"),
        pytest.param("1 GB/s", "1", "bandwidth", id="no unit"),
        pytest.param("count: 4", "count: 0", "count", id="zero"),
        pytest.param("1 GB/s", "-1 GB/s", "-1 GB/s", id="negative"),
        pytest.param("span: 4", "span: 3", "span 3", id="indivisible span"),
        pytest.param("cpu-core", "H1000", "H1000", id="unknown device"),
        pytest.param("cpu-core", "{kind: cpu}", "under `devices:`", id="figures for a name"),
        pytest.param("groups:", "groups: [", "YAML", id="no YAML"),
        pytest.param(
            "levels:\n",
            "levels:\n  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 1 us}\n",
            "a level before it is called so too",
            id="two levels of one name",
        ),
    ],
)
def test_cluster_files_that_cannot_be_used(run: Run, old: str, new: str, expected: str) -> None:
    code, message = run(*PLAN, cluster=changed(old, new, CLUSTER))
    assert code == 2
    assert expected in message


def test_what_is_wrong_with_a_file_is_told_in_a_few_words(run: Run) -> None:
    """Each alias holds the one before nine times."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    for i in range(1, 8):
        bomb += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n"
    for key in ("name", "groups", "levels"):
        code, message = run(*PLAN, cluster=f"{bomb}{key}: *a7\n")
        assert code == 2
        assert key in message
        assert len(message) < 4000


def test_a_report_is_written_whole_or_not_at_all(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*PLAN)[0] == 0
    (tmp_path / "report.html").write_text("before")

    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        code, message = run("report", "plan", "-o", "report.html")
    assert code == 2
    assert "report.html: No space left on device; give another place" in message
    assert (tmp_path / "report.html").read_text() == "before"
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".report")]
    assert run("report", "plan", "-o", "report.html")[0] == 0
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--fix", "tp=3"), "tp may be 1, 2 or 4"),
        (("--fix", "width=2"), "'width' cannot be fixed. Choose among dp_replicate, dp_shard, tp"),
        (("--fix", "zero=x"), "choose 0, 1, 2 or 3"),
        (("--fix", "microbatch=3"), "microbatch may be 1, 2, 4 or 8"),
        (("--fix", "tp=4,microbatch=5"), "5 samples on each of 1 data ranks"),
        (("--fix", "tp=2,dp_shard=4"), "8"),
        (("--fix", "tp=0"), "give a whole number from 1; on 4 devices tp may be 1, 2 or 4"),
        (("--fix", "tp=-1"), "give a whole number from 1; on 4 devices tp may be 1, 2 or 4"),
        (("--fix", "tp=" + "9" * 5000), "give a whole number from 1; on 4 devices"),
        (
            ("--fix", "foo=2"),
            "all_reduce, attention, kernels, prefetch, precision, gather; sequence_parallel",
        ),
        (("--fix", "precision=fp8"), "choose fp8-tensor, fp8-row, fp8-block or mxfp8"),
        (("--fix", "zero=7"), "0, 1, 2 or 3"),
        (("--fix", "recompute=often"), "often"),
        (("--fix", "offload=optimizer"), "offload=optimizer: cpu-core is a part of its host"),
        (("--fix", "tp=two"), "tp=two"),
        (("--searcher", "oracle"), "elimination"),
    ],
)
def test_options_that_cannot_be(run: Run, words: tuple[str, ...], expected: str) -> None:
    code, message = run(*PLAN, *words)
    assert code == 2
    assert expected in message


ARCH = ("estimate", "--arch", "arch.yaml", "--cluster", "cluster.yaml")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*ARCH, "--searcher", "mcts"), "--searcher is for a model file"),
        ((*ARCH, "--profile", "here.db"), "--profile is for a model file"),
        (("estimate", "model.py", "-c", "cluster.yaml", "--global-batch", "8"), "is for --arch"),
        (("estimate", "model.py", "-c", "cluster.yaml", "--precision", "bf16"), "is for --arch"),
        (
            ("plan", "model.py", "-c", "cluster.yaml", "--style", "fast"),
            "choose eager, layers, compiled or fastest",
        ),
        ((*ARCH, "--precision", "bf17"), "no architecture file 'arch.yaml'"),
    ],
)
def test_options_without_effect_are_refused(
    run: Run, words: tuple[str, ...], expected: str
) -> None:
    code, message = run(*words)
    assert code == 2
    assert expected in message


def test_a_batch_that_the_mesh_does_not_divide(run: Run) -> None:
    code, message = run(*PLAN, "--fix", "dp_shard=4", model=MODEL.replace("zeros(8", "zeros(7"))
    assert code == 2
    assert "7 samples" in message
    assert "4 devices" in message


def test_an_op_without_a_rule_runs_whole_where_the_user_says_so(run: Run, tmp_path: Path) -> None:
    model = changed(
        "F.relu(self.inner(x))", "self.inner(x) + self.inner(x).kthvalue(3, 1, True).values"
    )
    _, message = run(*PLAN, model=model)
    (allow,) = re.findall(r"--allow-replicated (\S+)", message)
    assert run(*PLAN, "--allow-replicated", allow, model=model) == (0, "")
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["replicated_ops"] == [allow]
    assert run("explain", "plan", model=model)[0] == 0
    code, message = run(*PLAN, model=model)  # what one plan was allowed holds for no other
    assert (code, allow in message) == (2, True)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("model.py/plan", "Not a directory"),
        ("/proc/plan", "no folder can be made there"),
        ("x" * 300, "File name too long"),
    ],
)
def test_places_that_a_plan_cannot_go_to(run: Run, place: str, expected: str) -> None:
    code, message = run("plan", "no_such_model.py", "--cluster", "cluster.yaml", "-o", place)
    assert code == 2
    assert expected in message
    assert "such as -o ./plan" in message


def test_devices_that_there_are_not(run: Run) -> None:
    assert run(*PLAN)[0] == 0
    for words in (("run", "plan", "--steps", "1"), ("verify", "plan")):
        code, message = run(*words, "--device", "tpu")
        assert (code, message[:36]) == (2, "device tpu: choose auto, cpu or cuda")


def test_arguments_that_a_workload_does_not_have(run: Run) -> None:
    for old, new in (
        ("batch=batch", "batch=batch, lr=1e-3"),
        ("@autopar.parallelize(batch=batch)", "w = autopar.Workload(batch=batch, lr=1e-3)"),
    ):
        code, message = run(*PLAN, model=MODEL.replace(old, new))
        assert code == 2
        assert "lr=...: a Workload has no such argument. Did you mean learning_rate?" in message
        assert "Traceback" not in message


def test_what_is_allowed_is_an_op_of_the_model(run: Run) -> None:
    model = changed(
        "F.relu(self.inner(x))", "self.inner(x) + self.inner(x).kthvalue(3, 1, True).values"
    )
    for word, expected in (
        (
            "aten::kthvalu",
            "no op of that kind. Did you mean aten::kthvalue? Without a rule are aten",
        ),
        ("something", "Its kinds are add, aten::kthvalue, cross_entropy, linear"),
    ):
        code, message = run(*PLAN, "--allow-replicated", word, model=model)
        assert code == 2
        assert (
            f"--allow-replicated {word}: the model has {expected}" in message or expected in message
        )
    code, message = run(*PLAN, "--allow-replicated", "rellu")
    assert (code, "Did you mean relu? All have rules" in message) == (2, True)


@pytest.mark.parametrize(
    ("table", "name", "value", "expected"),
    [
        ("ops", "inner/linear", "tp:zz", "is 'tp:zz'; allowed: whole, tp:"),
        ("parameters", "inner.weight", "tp:S9", "allowed: R, tp:D, tp:P, tp:S0, tp:S1. Put"),
        ("parameters", "inner.weight", "foo", "is 'foo'; allowed: R, tp:D"),
    ],
)
def test_explaining_a_plan_with_a_decision_that_cannot_be(
    run: Run, tmp_path: Path, table: str, name: str, value: str, expected: str
) -> None:
    assert run(*PLAN, "--fix", "tp=4")[0] == 0
    file = tmp_path / "plan" / "plan.json"
    plan = json.loads(file.read_text())
    plan["spreads"][0][table][name] = value
    file.write_text(json.dumps(plan))
    code, message = run("explain", "plan")
    assert code == 2
    assert f"spreads[0].{table}['{name}']" in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("mesh", "dp_replicate=4 x dp_shard=1 x tp=1", "leaves open"), ("microbatches", 3, "batch")],
)
def test_explaining_a_plan_whose_mesh_was_edited(
    run: Run, tmp_path: Path, name: str, value: object, expected: str
) -> None:
    assert run(*PLAN, "--fix", "tp=4")[0] == 0
    file = tmp_path / "plan" / "plan.json"
    plan = json.loads(file.read_text())
    (plan["spreads"][0] if name == "mesh" else plan)[name] = value
    file.write_text(json.dumps(plan))
    code, message = run("explain", "plan")
    assert code == 2
    assert expected in message


def test_explaining_an_op_that_there_is_not(run: Run) -> None:
    assert run(*PLAN)[0] == 0
    code, message = run("explain", "plan", "--op", "inner.linear")
    assert (code, message[:25]) == (2, "--op inner.linear: none o")
    assert "there are inner/linear, outer/linear" in message


def test_files_that_do_not_exist(run: Run) -> None:
    code, message = run("plan", "other.py", "--cluster", "cluster.yaml")
    assert (code, "other.py" in message) == (2, True)
    code, message = run("plan", "model.py", "--cluster", "other.yaml")
    assert (code, "other.yaml" in message) == (2, True)


def test_what_does_not_fit_says_by_how_much(run: Run, tmp_path: Path) -> None:
    model = changed("nn.Linear(16, 32)", "nn.Linear(16, 2**28)")
    code, message = run(*PLAN, model=changed("nn.Linear(32, 4)", "nn.Linear(2**28, 4)", model))
    assert code == 3
    for part in ("GiB", "too much", "cheapest change", "parameters"):
        assert part in message
    assert not (tmp_path / "plan").exists()


@pytest.mark.gloo(2)
def test_a_plan_whose_model_has_changed_is_not_run(run: Run) -> None:
    two = cluster_text(2)
    assert run(*PLAN, cluster=two)[0] == 0
    words = ("run", "plan", "--steps", "1")
    code, message = run(*words, model=MODEL.replace("32", "64"), cluster=two)
    assert code == 2
    assert "has changed since it was planned" in message
    assert "autopar plan" in message
    other = changed("(batch=batch)", '(batch=batch, optimizer="sgd", precision="bfloat16")')
    code, message = run(*words, model=other, cluster=two)
    assert code == 2
    assert "optimizer is 'sgd' and was 'adamw', precision is 'bfloat16' and was 'flo" in message
    other = changed("(batch=batch)", "(batch=batch, clip_norm=0.5)")
    for command in (words, ("verify", "plan")):
        code, message = run(*command, model=other, cluster=two)
        assert code == 2
        assert "has changed since it was planned: clip_norm is 0.5 and was None. Plan" in message


def test_a_plan_whose_cluster_file_has_changed_is_stale(run: Run, tmp_path: Path) -> None:
    assert run(*PLAN)[0] == 0
    other = changed("1 GB/s", "2 GB/s", CLUSTER)
    for words in (("run", "plan", "--steps", "1"), ("verify", "plan")):
        code, message = run(*words, cluster=other)
        assert code == 2
        assert f"{tmp_path / 'cluster.yaml'} has changed since the plan was made" in message
        assert re.search(r"was [0-9a-f]+ and is [0-9a-f]+; plan \S+model.py again", message)
    code, message = run("verify", "plan", cluster="levels: 3")
    assert (code, "cannot be read" in message) == (2, True)
    assert run("explain", "plan", cluster=other)[0] == 0
    commands.check_cluster_file(tmp_path / "some" / "where", read_plan(tmp_path / "plan"))
    with pytest.raises(commands.StaleCluster):
        commands.check_cluster_file(tmp_path / "plan", read_plan(tmp_path / "plan"))
    (tmp_path / "cluster.yaml").write_text("# as it was\n" + textwrap.dedent(CLUSTER))
    commands.check_cluster_file(tmp_path / "plan", read_plan(tmp_path / "plan"))


def test_what_explain_says_of_another_cluster(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*PLAN)[0] == 0
    file = tmp_path / "cluster.yaml"
    file.write_text(file.read_text().replace("1 GB/s", "2 GB/s"))
    explanation(tmp_path / "plan", None)
    assert "note: " in (warned := capsys.readouterr().err)
    assert "has changed since the plan was made for it" in warned
    file.unlink()
    explanation(tmp_path / "plan", None)
    assert "is not there: whether it changed is not known" in capsys.readouterr().err
    local = replace(read_plan(tmp_path / "plan"), cluster_file="")
    commands.check_cluster_file(tmp_path / "plan", local)
    assert not capsys.readouterr().err


@pytest.mark.gloo
def test_a_program_that_was_edited_is_told_by_its_lines(run: Run, tmp_path: Path) -> None:
    assert run(*PLAN, "--fix", "tp=4")[0] == 0
    program = tmp_path / "plan" / "program" / "model.py"
    right = program.read_text()
    line = 'weight=Parameter((32, 16), "tp:S0")'
    program.write_text(changed(line, "weight=Parameter((32, 16))", right))
    code, message = run("verify", "plan")
    assert code == 2
    assert "the program fails at" in message
    assert line in message.partition("the plan gives `")[2]
    (reduced,) = re.findall(r"outer = .*all_reduce\(.*\)", right)
    program.write_text(right.replace(reduced, f"{reduced} * 2"))
    result = launch.verify(tmp_path / "plan")
    assert not result.passed
    place = rf"outer \({program.parents[2]}/model\.py:\d+\)"
    pattern = rf"first difference: forward, outer/linear resharded in {place}"
    assert re.match(pattern, result.first_difference)
    assert f"is `{reduced} * 2`, the plan gives" in result.first_difference
    program.write_text(changed("F.relu(", "F.gelu(", right))
    result = launch.verify(tmp_path / "plan")
    assert not result.passed
    pattern = (
        rf"first difference: forward, \S+ in \S+ \({program.parents[2]}/model\.py:\d+\): value"
    )
    assert re.match(pattern, result.first_difference)
    assert re.search(r"is \S+ and should be \S+ \(relative", result.first_difference)
    assert "F.gelu(" in result.first_difference.partition("the plan gives")[0]


@pytest.mark.gloo
def test_an_error_in_the_middle_of_a_run_stops_all_ranks(run: Run) -> None:
    late = MODEL.replace("def batch():", "def batch(step=0):\n        1 / (step - 2)")
    assert run(*PLAN, model=late)[0] == 0
    code, message = run("run", "plan", "--steps", "5", model=late)
    assert code == 2
    assert "in step 2" in message
    assert "ZeroDivisionError" in message


GROUPS = """
    import jax
    import jax.numpy as jnp
    import autopar

    def init(key):
        return {"w": jnp.zeros((32, 4, 4))}

    def loss(params, batch):
        made = jax.lax.conv_general_dilated(
            batch["x"], params["w"], (1,), "SAME", feature_group_count=4
        )
        return (made ** 2).mean()

    workload = autopar.Workload(loss=loss, init=init, batch=lambda: {"x": jnp.zeros((4, 16, 32))})
"""


def test_a_program_that_cannot_be_written_names_pins_that_were_planned(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = replace(ROWS[LOCAL_GROUPS], calls={})  # as if no backend had it
    rows = {**ROWS, LOCAL_GROUPS: lacking}
    monkeypatch.setattr("autopar.emit.implementations.TABLE", rows)
    words = ("plan", "model.py", "--cluster", "cluster.yaml", "--fix", "tp=2,dp_shard=2")
    code, said = run(*words, model=GROUPS)
    assert code == 2
    assert "by local_groups over tp" in said
    assert "--fix tp=1,dp_shard=2 plans: dp_replicate 2 x dp_shard 2" in said
    assert "not tried" not in said
