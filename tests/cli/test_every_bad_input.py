"""A hundred and thirty things that people type wrongly: each is one clear message.

Clear: exit code 2 or 3 and no output but the message; it names what was given, or where; it is no
traceback, speaks of no defect and has at most `LONGEST` characters.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.cli import app as cli
from tests.cli.test_bad_input import CLUSTER, MODEL

LONGEST = 1500
ROOT = Path(__file__).parents[2]
ARCH = (ROOT / "examples" / "archs" / "llama3_70b.yaml").read_text()
Files = dict[str, str]
PLAN = ("plan", "model.py", "-c", "cluster.yaml", "-o", "new")
ESTIMATE = ("estimate", "model.py", "-c", "cluster.yaml")
OF_ARCH = ("estimate", "--arch", "arch.yaml", "-c", "cluster.yaml", "--global-batch", "8")


def command(words: tuple[str, ...] | str, *said: str) -> object:
    """A command with the right files."""
    given = words.split() if isinstance(words, str) else words
    return pytest.param(tuple(given), {}, said, id=" ".join(given)[:60])


def file(name: str, old: str, new: str, words: tuple[str, ...], *said: str) -> object:
    """A command whose file ``name`` has ``new`` where ``old`` should be; ``old`` "": all of it."""
    right = {"model.py": textwrap.dedent(MODEL), "cluster.yaml": CLUSTER, "arch.yaml": ARCH}[name]
    assert old in right, old
    text = right.replace(old, new, 1) if old else new
    return pytest.param(words, {name: text}, said, id=f"{name}: {new[:40]!r}")


def model(old: str, new: str, *said: str) -> object:
    return file("model.py", old, new, PLAN, *said)


def cluster(old: str, new: str, *said: str) -> object:
    return file("cluster.yaml", old, new, PLAN, *said)


def arch(old: str, new: str, *said: str) -> object:
    return file("arch.yaml", old, new, OF_ARCH, *said)


LOSS = "F.cross_entropy(self.outer(F.relu(self.inner(x))), y)"
COMMANDS = [
    command("plan", "MODEL.PY"),
    command("plan model.py", "--cluster"),
    command("plan nothing.py -c cluster.yaml", "nothing.py"),
    command("plan model.py -c nothing.yaml", "nothing.yaml"),
    command("plan model.py -c .", "."),
    command("plan . -c cluster.yaml", "."),
    command("plan model.py:Other -c cluster.yaml", "Other"),
    command("plan model.py:batch -c cluster.yaml", "batch"),
    command("plan cluster.yaml -c cluster.yaml", "cluster.yaml"),
    command("plan model.py -c model.py", "model.py"),
    command((*PLAN, "--fix", "tp"), "tp"),
    command((*PLAN, "--fix", "tp="), "tp="),
    command((*PLAN, "--fix", "=2"), "=2"),
    command((*PLAN, "--fix", "tp=1.5"), "1.5"),
    command((*PLAN, "--fix", "tp=2,tp=4"), "tp"),
    command((*PLAN, "--fix", "pp=3"), "pp"),
    command((*PLAN, "--fix", "pp=4,schedule=1f1b,microbatch=3"), "microbatch"),
    command((*PLAN, "--fix", "dp=5"), "dp"),
    command((*PLAN, "--fix", "tp=8"), "tp"),
    command((*PLAN, "--fix", "dp_shard=2,zero=0"), "dp_shard"),
    command((*PLAN, "--fix", "dp_shard=1,zero=3"), "zero"),
    command((*PLAN, "--fix", "microbatch=0"), "microbatch"),
    command((*PLAN, "--fix", "microbatch=16"), "microbatch"),
    command((*PLAN, "--fix", "recompute="), "recompute"),
    command((*PLAN, "--fix", "schedule=gpipe"), "schedule"),
    command((*PLAN, "--fix", "schedule=nothing,pp=2"), "nothing"),
    command((*PLAN, "--fix", "offload=everything"), "everything"),
    command((*PLAN, "--fix", "cp=3"), "cp"),
    command((*PLAN, "--fix", "ep=2"), "ep"),
    command((*PLAN, "--fix", "TP=2"), "TP"),
    command((*PLAN, "--fix", "tp=2;dp_shard=2"), "tp"),
    command((*PLAN, "--style", "quick"), "quick"),
    command((*PLAN, "--searcher", ""), "searcher"),
    command((*PLAN, "--profile", "nothing.db"), "nothing.db"),
    command((*PLAN, "--allow-replicated", ""), "allow-replicated"),
    command((*PLAN, "--colour", "red"), "--colour"),
    command((*PLAN, "--try", "0"), "--try"),
    command((*PLAN, "--try", "3", "--fix", "sequence_parallel=off"), "--try"),
    command((*PLAN, "--fix", "cp=2,cp_head=4"), "cp_head"),
    command(("tune", "nowhere"), "nowhere"),
    command(("tune", "nowhere", "--try", "1"), "--try"),
    command((*PLAN, "--verbos"), "--verbos"),
    command((*ESTIMATE, "--devices", "0"), "--devices"),
    command((*ESTIMATE, "--devices", "3.5"), "3.5"),
    command((*ESTIMATE, "--devices", "-4"), "--devices"),
    command((*ESTIMATE, "--batch-tokens", "-1"), "--batch-tokens"),
    command((*ESTIMATE, "--seq", "0"), "--seq"),
    command((*ESTIMATE, "--seq", "many"), "--seq"),
    command("estimate -c cluster.yaml", "--arch"),
    command("estimate model.py --arch arch.yaml -c cluster.yaml", "--arch"),
    command("estimate --arch nothing.yaml -c cluster.yaml --global-batch 8", "nothing.yaml"),
    command("estimate --arch arch.yaml -c cluster.yaml --global-batch 0", "--global-batch"),
    command("estimate --arch arch.yaml -c cluster.yaml --global-batch -8", "--global-batch"),
    command((*OF_ARCH, "--precision", "fp7"), "fp7"),
    command((*OF_ARCH, "--fix", "tp=3"), "tp"),
    command((*OF_ARCH, "--allow-replicated", "sort"), "--allow-replicated"),
    command("run nothing", "nothing"),
    command("run model.py", "model.py"),
    command("run plan --steps 0", "--steps"),
    command("run plan --steps -5", "--steps"),
    command("run plan --steps some", "--steps"),
    command("run plan --device tpu", "tpu"),
    command("run plan --device cuda", "cuda"),
    command("run plan --resume nothing", "nothing"),
    command("run plan --save-every 5", "--save"),
    command("run plan --save out --save-every -1", "--save-every"),
    command("run plan --compile=yes", "--compile"),
    command("verify nothing", "nothing"),
    command("verify plan --device abacus", "abacus"),
    command("verify plan --steps 3", "--steps"),
    command("explain nothing", "nothing"),
    command("explain plan --op nothing", "nothing"),
    command("explain plan --memory huge", "huge"),
    command("explain plan --trace nowhere/at/all.json", "nowhere"),
    command("report nothing", "nothing"),
    command("report plan --run nothing.json", "nothing.json"),
    command("report plan -o nowhere/at/all/report.html", "nowhere"),
    command("show nothing.py", "nothing.py"),
    command("show model.py --as plan", "plan"),
    command("show plan --as picture", "picture"),
    command("show plan --stage 7", "7"),
    command("show plan --stage -1", "--stage"),
    command("diff plan", "B/"),
    command("diff plan nothing", "nothing"),
    command("diff plan model.py", "model.py"),
    command("export plan --to pbs", "pbs"),
    command("export plan", "--to"),
    command("export nothing --to deepspeed", "nothing"),
    command("export plan --to nothing -o out", "nothing"),
    command("import nothing.json model.py -c cluster.yaml", "nothing.json"),
    command("import cluster.yaml model.py -c cluster.yaml", "cluster.yaml"),
    command("import cluster.yaml model.py -c cluster.yaml --from slurm", "slurm"),
    command("profile -c nothing.yaml", "nothing.yaml"),
    command("rehearse nothing", "nothing"),
    command("rehearse model.py", "model.py"),
    command("plann model.py", "plann"),
    command("--versionn", "--versionn"),
]
MODELS = [
    model("import autopar", "import autopar, nothing_of_this_name", "nothing_of_this_name"),
    model("import torch\n", "", "torch"),
    model("@autopar.parallelize(batch=batch)", "", "@autopar.parallelize"),
    model("batch=batch", "", "batch"),
    model("batch=batch", "batch=None", "batch"),
    model("batch=batch", "batch=batch, optimizer='lion'", "lion"),
    model("batch=batch", "batch=batch, learning_rate=-1.0", "learning_rate"),
    model("batch=batch", "batch=batch, precision='half'", "half"),
    model("batch=batch", "batch=batch, clip_norm=0", "clip_norm"),
    model("batch=batch", "batch=batch, seed='x'", "seed"),
    model("zeros(8, 16)", "zeros(4, 16)", "4", "8"),
    model('"x": ', '"z": ', "z"),
    model('"y": torch', '"y": "labels", "w": torch', "batch['y'] is a str"),
    model('"x": torch.zeros(8, 16)', '"x": None', "x"),
    model('"x": torch.zeros(8, 16)', '"x": torch.zeros(8, 17)', "17"),
    model('"x": torch.zeros(8, 16)', '"x": torch.tensor(1.0)', "model.py:18", "0D"),
    model("return {", "return [", "model.py"),
    model("def batch():", "def batch(size):", "size"),
    model("def batch():", "def batch():\n    raise RuntimeError('no data here')", "no data here"),
    model("super().__init__()", "pass", "model.py:14", "Module.__init__()"),
    model("def __init__(self):", "def __init__(self, width):", "width"),
    model("nn.Linear(32, 4)", "nn.Linear(33, 4)", "33"),
    model("self.outer(F", "self.outre(F", "outre"),
    model(LOSS, "self.inner(x)", "scalar"),
    model(LOSS, "{'loss': x.mean()}['los']", "los"),
    model(LOSS, "None", "None"),
    model(LOSS, "3.0", "returns a float"),
    model(LOSS, "self.inner(x)[: int(x.sum())].mean()", "value"),
    model(LOSS, "self.inner(x)[x[:, 0] > 0].sort(0).values.mean()", "model.py"),
    model(LOSS, "torch.autograd.grad(self.inner(x).sum(), x)[0].sum()", "autograd.grad inside"),
    model(LOSS, "self.inner(x).sum().backward()", "autograd.backward inside"),
]
CLUSTERS = [
    cluster("", "", "cluster.yaml"),
    cluster("", "[]", "cluster.yaml"),
    cluster("", "name: x\n", "groups"),
    cluster("count: 4", "count: four", "four"),
    cluster("count: 4", "count: 4.5", "4.5"),
    cluster("count: 4", "count: -4", "-4"),
    cluster("count: 4", "cuont: 4", "cuont"),
    cluster("device: cpu-core", "device: null", "device"),
    cluster("span: 4", "span: 0", "span"),
    cluster("span: 4", "span: 8", "span"),
    cluster("bandwidth: 1 GB/s", "bandwidth: fast", "fast"),
    cluster("bandwidth: 1 GB/s", "bandwidth: 0 GB/s", "bandwidth"),
    cluster("latency: 100 us", "latency: -1 us", "-1 us"),
    cluster("latency: 100 us", "latency: 100 m", "100 m"),
    cluster("library: gloo", "library: smoke", "smoke"),
    cluster("levels:", "level:", "level"),
    cluster("groups:", "groups: 3\nmore:", "groups"),
    cluster("\nname: cores", "\nname: cores\nname: again", "name"),
]
ARCHS = [
    arch("", "", "arch.yaml"),
    arch("", "layers: 2", "arch.yaml"),
    arch("layers:", "layres:", "layres"),
    arch("hidden:", "hidden: wide #", "wide"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with right files and a plan."""
    folder = tmp_path_factory.mktemp("right")
    (folder / "model.py").write_text(textwrap.dedent(MODEL))
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "arch.yaml").write_text(ARCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["autopar", *PLAN[:-1], "plan"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "job"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def check(
    words: tuple[str, ...],
    said: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(os.listdir())
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert code in (2, 3), (code, out, err)
    assert [part for part in said if part not in err] == [], err
    for bad in ("Traceback", "defect of autopar", "internal error", "site-packages"):
        assert bad not in err
    assert len(err) <= LONGEST, err
    assert sorted(os.listdir()) == before  # nothing half done is left


@pytest.mark.parametrize(("words", "files", "said"), [*COMMANDS, *MODELS, *CLUSTERS, *ARCHS])
def test_it_is_said_clearly(
    words: tuple[str, ...],
    files: Files,
    said: tuple[str, ...],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in files.items():
        (place / name).write_text(text)
    check(words, said, monkeypatch, capsys)


def _without(name: str) -> Callable[[Path], object]:
    return lambda plan: (plan / name).unlink()


def _half(name: str) -> Callable[[Path], object]:
    def cut(plan: Path) -> None:
        text = (plan / name).read_text()
        (plan / name).write_text(text[: len(text) // 2])

    return cut


def _edited(key: str, value: object) -> Callable[[Path], object]:
    def edit(plan: Path) -> None:
        content = json.loads((plan / "plan.json").read_text())
        assert key in content
        content[key] = value
        (plan / "plan.json").write_text(json.dumps(content))

    return edit


DAMAGED = {
    "no plan.json": (_without("plan.json"), "plan.json"),
    "no program": (_without("program/model.py"), "model.py"),
    "half a plan.json": (_half("plan.json"), "plan.json"),
    "half a program": (_half("program/model.py"), "model.py"),
    "microbatches of text": (_edited("microbatches", "four"), "microbatches"),
    "microbatches of zero": (_edited("microbatches", 0), "microbatches"),
    "precision": (_edited("precision", "float7"), "float7"),
    "no spreads": (_edited("spreads", []), "spreads"),
    "no stages": (_edited("stages", []), "stages"),
}


DECISIONS_ALONE = ("no program", "half a program")
"""What `explain` does not notice."""
BROKEN = [
    *(("run", name) for name in DAMAGED),
    *(("explain", name) for name in DAMAGED if name not in DECISIONS_ALONE),
]


@pytest.mark.parametrize(("command", "name"), BROKEN)
def test_damaged_plans_are_told(
    command: str,
    name: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage, said = DAMAGED[name]
    damage(place / "plan")
    check((command, "plan"), (said,), monkeypatch, capsys)


def test_there_are_at_least_130() -> None:
    assert len([*COMMANDS, *MODELS, *CLUSTERS, *ARCHS, *BROKEN]) >= 130
