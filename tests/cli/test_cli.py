"""The command line as a person meets it: exit codes, one message, nothing heavy before it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from autopar.cli import app as cli
from autopar.files import plan_folder
from autopar.nouns.errors import DoesNotFit, UserError
from autopar.nouns.grammar import pairs_of
from autopar.nouns.layout import LayoutError
from autopar.nouns.plan import Stage, to_json
from autopar.searchers import SEARCHERS
from tests import plans


def run(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of ``autopar words...``, run in this process."""
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return 0 if code is None else int(code)


@pytest.mark.parametrize(
    ("texts", "fixed"),
    [
        ((), {}),
        (("tp=2",), {"tp": "2"}),
        (("tp=2, dp_shard=4", "zero=3"), {"tp": "2", "dp_shard": "4", "zero": "3"}),
        (("tp=2", "tp=2"), {"tp": "2"}),
        (("tp=2 dp_shard=2,",), {"tp": "2", "dp_shard": "2"}),
    ],
)
def test_fix_is_a_list_of_choices(texts: tuple[str, ...], fixed: dict[str, str]) -> None:
    assert pairs_of(texts) == fixed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "not KEY=VALUE"),
        ("tp=", "not KEY=VALUE"),
        ("=2", "not KEY=VALUE"),
        ("tp=2,tp=4", "--fix gives tp twice, as 2 and as 4"),
    ],
)
def test_a_wrong_fix_says_what_is_right(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pairs_of([text])


@pytest.mark.parametrize(("error", "code"), [(UserError, 2), (DoesNotFit, 3)])
def test_a_users_error_is_one_message_on_stderr(
    error: type[UserError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(folder: object) -> None:
        raise error("12 GB are needed, 8 GB are there; try tp=2")

    monkeypatch.setattr(plan_folder, "read_plan", refuse)
    assert run("diff", "a", "b", monkeypatch=monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "autopar: 12 GB are needed, 8 GB are there; try tp=2\n"


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(plan_folder, "read_plan", broken)
    monkeypatch.setattr(sys, "argv", ["autopar", "diff", "a", "b"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize("words", [("unknown",), ("plan", "model.py"), ("diff", "a", "--wide")])
def test_a_command_that_does_not_exist_ends_with_2(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*words, monkeypatch=monkeypatch) == 2


def test_a_folder_without_a_plan_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", str(tmp_path), str(tmp_path), monkeypatch=monkeypatch) == 2
    assert "autopar plan model.py" in capsys.readouterr().err


def test_plan_refuses_a_foreign_folder_before_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    words = ("plan", "no_such_model.py", "--cluster", "local", "-o", str(tmp_path))
    assert run(*words, monkeypatch=monkeypatch) == 2
    assert "thesis.tex" in capsys.readouterr().err


def test_diff_prints_tables_or_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_folder.write(tmp_path / "a", {"plan.json": to_json(plans.plan())})
    plan_folder.write(tmp_path / "b", {"plan.json": to_json(plans.plan(stages=(Stage(zero=3),)))})
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    assert run("diff", *folders, monkeypatch=monkeypatch) == 0
    assert "Decisions (1 differ)" in capsys.readouterr().out
    assert run("diff", *folders, "--json", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["decisions"] == {"ZeRO": ["2", "3"]}
    assert err == ""


def test_help_names_every_searcher_and_the_training_settings() -> None:
    command = typer.main.get_command(cli.app).commands["plan"]  # type: ignore[attr-defined]
    (searcher,) = [p.help for p in command.params if p.name == "searcher"]
    assert all(f"{name} (" in searcher for name in SEARCHERS)
    (fix,) = [p.help for p in command.params if p.name == "fix"]
    assert "samples that one microbatch has on one data rank" in fix
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for setting in ("precision", "learning_rate", "clip_norm", "optimizer", "seed"):
        assert setting in command.help
        assert f"`{setting}`" in readme


def test_ctrl_c_while_a_command_starts_is_one_line(tmp_path: Path) -> None:
    """A stop while the largest import runs; the real one is hit by chance only."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "autopar"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (130, "autopar: stopped\n")


def test_help_is_instant_and_needs_no_framework() -> None:
    """Under 0.3 CPU seconds, the best of five: other work on the machine must not count."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "autopar", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "explain" in done.stdout
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3


CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "cpu_4.yaml"
PLAN = [sys.executable, "-m", "autopar", "plan", "model.py", "--cluster", str(CLUSTER)]
MODEL = """
import atexit
atexit.register(print, "done at the end")
raise SystemExit("no weights here")
"""


def test_what_is_left_for_the_end_of_the_process_is_done(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = subprocess.run(PLAN, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "no weights here" in done.stderr
    assert done.stdout == "done at the end\n"


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    pipe = subprocess.PIPE
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        PLAN, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=buffered
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.close()
        printed = job.stderr.read()
    assert job.returncode == 2
    assert "BrokenPipe" not in printed
