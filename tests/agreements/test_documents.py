"""What the documents tell people to type exists: commands, options, targets, files, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from autopar.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def typed(document: Path, program: str) -> list[list[str]]:
    """Every call of ``program``: indented lines, fenced console lines, and between backticks."""
    text = document.read_text()
    fenced = "\n".join(re.findall(r"^```console\n(.*?)^```", text, re.M | re.S))
    lines = re.findall(rf"^ {{4}}(?:\.venv/bin/)?({program} .+)$", text, re.M)
    lines += re.findall(rf"^(?:\.venv/bin/)?({program} .+)$", fenced, re.M)
    lines += re.findall(rf"`(?:\.venv/bin/)?({program} [^`\n]+)`", text)
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_commands_and_their_options_exist(document: Path) -> None:
    for words in typed(document, "autopar"):
        if words[0].startswith("-"):
            continue
        assert words[0] in COMMANDS, f"{document}: no command `autopar {words[0]}`"
        known = {name for parameter in COMMANDS[words[0]].params for name in parameter.opts}
        for word in words[1:]:
            if word.startswith("-"):
                assert word in known, f"{document}: `autopar {words[0]}` has no {word}"
            elif word.startswith(("examples/", "benchmarks/")):
                assert (ROOT / word.split(":")[0]).exists(), f"{document}: no file {word}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in typed(document, "make"):
        assert re.search(rf"^{words[0]}:", makefile, re.M), f"{document}: make {words[0]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_benchmarks_exist(document: Path) -> None:
    for words in typed(document, r"(?:\.venv/bin/)?python"):
        if words[:1] == ["-m"] and words[1].startswith("benchmarks."):
            path = ROOT / words[1].replace(".", "/")
            files = path.with_suffix(".py"), path / "__main__.py"
            assert any(file.exists() for file in files), f"{document}: no {words[1]}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.suffix == ".md"], ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document} links to {target}"


def test_every_command_has_help() -> None:
    assert {"plan", "run", "verify", "explain", "diff", "estimate"} <= set(COMMANDS)
    for name, command in COMMANDS.items():
        assert command.help, f"autopar {name} says nothing about itself"
        for parameter in command.params:
            if parameter.name != "help":
                assert parameter.help, f"autopar {name}: {parameter.name} has no help"


def test_install_commands_are_those_of_the_makefile() -> None:
    """Two commands set everything up, and `make` runs the same two."""
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert "python3 -m venv .venv\n" in readme
    assert "-m venv .venv\n" in makefile
    install = "install {}-c constraints.txt -e '.[dev]'"
    assert ".venv/bin/pip " + install.format("") in readme
    assert install.format("--quiet --disable-pip-version-check --no-compile ") in makefile
