"""Kinds of models in plain JAX, Equinox, NNX, Linen and Haiku: six plans each on 8 virtual devices.

    python -m benchmarks.jax_zoo [--only NAME]... [--framework NAME]... [--keep DIR] [--json]

A plan is right where `autopar verify` finds in float64 what one device computes and the collectives
that were priced; refused where there is none, with the first words of why. A framework that is not
installed is a row of its own. `benchmarks.jax_zoo_gradients` compares with `jax.grad` alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.nouns.errors import UserError
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.verify.verified import TOLERANCE, VerifyResult
from benchmarks.figures import Target, show
from benchmarks.jax_zoo_models import INSTALL, Kind, kinds
from benchmarks.planned import planned_in

CLUSTER = """name: eight fast cores
groups:
  - {device: cpu-core, count: 8}
levels:
  - {name: loopback, span: 8, bandwidth: 1000 GB/s, latency: 0.1 us, library: gloo}
"""
"""A link on which small models are split over ranks as large ones are."""
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "dp": {"dp_replicate": "8"},
    "ZeRO 3": {"dp_shard": "8", "zero": "3"},
    "dp x tp": {"dp_replicate": "2", "tp": "4"},
    "ZeRO 2 x tp": {"dp_shard": "2", "tp": "4", "zero": "2"},
    "tp": {"tp": "8"},
    "recompute": {"dp_replicate": "4", "tp": "2", "recompute": "full", "microbatch": "2"},
}
WHOLE = {"microbatch": "4"}
"""In place of two microbatches, for models that compare samples."""
SHOWN = 60
"""Letters of a reason in a table."""
KINDS_WANTED, REFUSED_AT_MOST = 24, 1
_MODEL = "from benchmarks.jax_zoo_models import workload_of\n\nworkload = workload_of({!r})\n"


def cluster_in(home: Path) -> str:
    file = home / "cluster.yaml"
    file.write_text(CLUSTER)
    return str(file)


def model_in(home: Path, kind: Kind) -> Path:
    """The file that a plan of ``kind`` is made of."""
    home.mkdir(parents=True)
    model = home / "model.py"
    model.write_text(_MODEL.format(kind.name))
    return model


def layouts(kind: Kind) -> dict[str, dict[str, str]]:
    """The pins of its six plans."""
    more = WHOLE if kind.joined else {}
    return {n: {**fix, **(more if "microbatch" in fix else {})} for n, fix in LAYOUTS.items()}


def row(kind: Kind, home: Path) -> dict[str, Any]:
    """What became of each layout of one kind; ``why`` of the first that is not right."""
    home.mkdir(parents=True)
    model = model_in(home / "model", kind)
    plans, refused = planned_in(str(model), home / "plans", layouts(kind), cluster_in(home))
    outcome = {name: ("refused", why) for name, why in refused.items()}
    errors = []
    for name, result in zip(plans, _verified(list(plans.values())), strict=True):
        outcome[name] = _judged(result)
        errors += [result.exact.largest] if isinstance(result, VerifyResult) else []
    why = next((why for word, why in outcome.values() if word != "right"), "")
    return {
        "kind": kind.name,
        "framework": kind.framework,
        **{name: outcome[name][0] for name in LAYOUTS},
        "error": max(errors, default=None),
        "why": " ".join(why.split()),
        "source": kind.source,
    }


def _verified(folders: Sequence[Path]) -> list[VerifyResult | str]:
    """Of each plan its verification, or why that could not run."""
    if not folders:
        return []
    try:
        return [*verify_many(folders)]
    except UserError as error:
        if len(folders) == 1:
            return [str(error)]
        return [each for folder in folders for each in _verified([folder])]


def _judged(result: VerifyResult | str) -> tuple[str, str]:
    if isinstance(result, str):
        return "crashed", result
    seen = [*result.collective_differences, result.first_difference]
    why = "; ".join(filter(None, seen)) or f"error {result.exact.largest:.1e}"
    right = result.passed and result.exact.largest <= TOLERANCE
    return ("right", "") if right else ("WRONG", why)


def targets(made: Sequence[Mapping[str, Any]]) -> list[Target]:
    words = [{row[name] for name in LAYOUTS} for row in made]
    return [
        Target("kinds of which a plan is WRONG", sum("WRONG" in w for w in words), 0),
        Target("kinds of which a plan cannot run", sum("crashed" in w for w in words), 0),
        Target(
            "kinds of which a plan is refused", sum("refused" in w for w in words), REFUSED_AT_MOST
        ),
    ]


def chosen(only: Sequence[str], frameworks: Sequence[str]) -> tuple[list[Kind], list[str]]:
    """The kinds that are asked for, and the packages that are missing for others."""
    every, missing = kinds()
    some = [
        kind
        for kind in every.values()
        if (not only or kind.name.startswith(tuple(only)))
        and (not frameworks or kind.framework in frameworks)
    ]
    return some, missing


def rows(some: Sequence[Kind], home: Path) -> Iterator[dict[str, Any]]:
    for number, kind in enumerate(some):
        yield row(kind, home / f"kind_{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="what names begin by")
    parser.add_argument("--framework", action="append", default=[], help="such as Equinox")
    parser.add_argument("--keep", type=Path, help="an empty folder where plans stay")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    some, missing = chosen(given.only, given.framework)
    if not some:
        parser.error(f"--only {given.only} --framework {given.framework}: no kind is called so")
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        for each in rows(some, (given.keep or Path(scratch)).resolve()):
            print({k: v for k, v in each.items() if v and k != "source"}, file=sys.stderr)
            made.append(each)
    for package in missing:
        print(
            f"{package} is not installed, and its kinds are left out: pip install "
            f"{INSTALL[package]}",
            file=sys.stderr,
        )
    met = targets(made)
    if not given.only and not given.framework:
        met.append(Target("kinds fewer than wanted", max(0, KINDS_WANTED - len(made)), 0))
    show(made if given.json else [_line(each) for each in made], met, given.json)
    sys.exit(0 if all(target.met for target in met) else 1)


def _line(made: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in made.items() if k != "source"}, "why": made["why"][:SHOWN]}


if __name__ == "__main__":
    main()
