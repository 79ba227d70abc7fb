"""Predicted against published training runs: `python -m benchmarks.published CSV [--json]`.

Every row of the CSV is priced, or says why it cannot be. Errors are taken once per configuration;
the quoted ones are those of constants fitted without the row's source (and, in the second line,
without the row's configuration). Three more lines forget what `published_sources.yaml` declares of
the source as well, as for a source that nobody has seen: `undeclared` reads no more than the
software that a row or its title names, `untitled` not even the title, `unseen` without the rules
that no other source's rows meet. `--fit` writes the constants fitted on all rows to
`cost_models/fitted.yaml`, and refuses few rows without `--force`; `--quick` skips left-out fits;
`--plot FILE` draws the scatter.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from autopar.cost_models.bands import memory_band, time_band
from autopar.cost_models.rates import fitted, fitted_table
from autopar.planner.family.runs import peak_bytes, step_of
from benchmarks.published_bands import report, time_ratios, write_bands
from benchmarks.published_declarations import Row
from benchmarks.published_errors import (
    AMONG,
    MOST_MEMORY,
    RANKING_TARGETS,
    TARGETS,
    classes,
    defying,
    errors,
    memory_errors,
    memory_ratios,
    ranking,
    schedules_in_order,
)
from benchmarks.published_fit import Fit, one_per_configuration, source_of
from benchmarks.published_forgetting import FORGETTING, forget, forgotten_memory
from benchmarks.published_priors import priors
from benchmarks.published_rows import Run, Unpriceable, read_run

Array = NDArray[np.float64]
# Fewer configurations or sources than this cannot be left out of a fit of fifty constants.
LEAST_CONFIGURATIONS, LEAST_SOURCES = 60, 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="shipped constants only")
    parser.add_argument("--fit", action="store_true", help="write cost_models/fitted.yaml")
    parser.add_argument("--force", action="store_true", help="fit to few rows all the same")
    parser.add_argument("--plot", type=Path, help="write a scatter plot")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.csv)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        parser.error(f"{options.csv}: {error}")
    runs, reasons = read_all(rows)
    timed = one_per_configuration([run for run in runs if run.measured_s])
    fit = Fit(timed)
    sources = len({run.source for run in timed})
    few = len(timed) < LEAST_CONFIGURATIONS or sources < LEAST_SOURCES
    if options.fit and few and not options.force:
        parser.error(
            f"--fit: {len(timed)} timed configurations of {sources} sources in {options.csv} "
            f"would take the place of the shipped constants; {LEAST_CONFIGURATIONS} of "
            f"{LEAST_SOURCES} are the least for a fit of {len(fit.names)} constants. "
            "--force fits to them all the same"
        )
    if options.fit:
        write_constants(fit)
    by_id = {row["id"]: row for row in rows}
    result = evaluate(fit, options.quick or few, by_id)
    result["versions"] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    result["memory"] = memory_errors(runs)
    for label in FORGETTING:
        result["memory"][label] = memory_errors(forgotten_memory(runs, by_id, label))["all"]
    ratios = time_ratios(fit.runs, result["predicted"]) + memory_ratios(runs)
    if options.fit and not (options.quick or few):
        write_bands(ratios)
    result["bands"] = report(ratios)
    if options.plot:
        plot(fit, result["predicted"], options.plot)
    if options.json:
        del result["predicted"]
        result["rows"] = [row_report(row["id"], runs, reasons) for row in rows]
        print(json.dumps(result, indent=1))
    else:
        print(render(result, reasons, fit))
    return 0


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file; one without an id, or with that of another, is told by its line."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows, seen = [], set()
        for row in reader:
            name = row.get("id") or ""
            if not name or name in seen:
                name = f"{name} (line {reader.line_num})".strip()
            seen.add(name)
            rows.append({**row, "id": name})
    return rows


def read_all(rows: Iterable[Row]) -> tuple[list[Run], dict[str, str]]:
    """Every run that can be priced, and the reason of every row that cannot."""
    runs, reasons = [], {}
    for row in rows:
        try:
            run = _read(row)
            price_run(run)  # a constant that is missing ends here: it is no fault of the row
            peak_bytes(run.priced)
        except Unpriceable as error:
            reasons[row["id"]] = str(error)
        except (ValueError, ArithmeticError) as error:
            reasons[row["id"]] = f"its cells cannot be priced: {error}"
        else:
            runs.append(run)
    return runs, reasons


def _read(row: Row) -> Run:
    """Raises `Unpriceable`, also where a cell is not what its column holds."""
    try:
        return read_run(row)
    except Unpriceable:
        raise
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise Unpriceable(f"its cells cannot be read: {error}") from error


def price_run(run: Run) -> float:
    """Step seconds by the shipped constants."""
    return float(step_of(run.priced).total_s)


def row_report(row_id: str, runs: Sequence[Run], reasons: dict[str, str]) -> dict[str, Any]:
    """One row of the JSON output."""
    row: dict[str, Any] = {
        "id": row_id,
        "predicted_tokens_per_s_per_gpu": None,
        "predicted_step_time_s": None,
        "predicted_peak_mem_gib": None,
        "band": None,
        "reason": reasons.get(row_id),
    }
    run = next((run for run in runs if run.id == row_id), None)
    if run is None:
        return row
    seconds = price_run(run)
    memory = peak_bytes(run.priced)
    tokens = run.layout.global_batch * run.arch.seq / run.layout.device_count
    band = time_band(run.cluster.device.family, run.arch.is_moe)
    row["predicted_tokens_per_s_per_gpu"] = tokens / seconds
    row["predicted_step_time_s"] = seconds
    row["predicted_peak_mem_gib"] = memory / 2**30
    row["band"] = {
        "step_time_s": list(band.around(seconds)),
        "peak_mem_gib": [size / 2**30 for size in memory_band().around(memory)],
    }
    return row


def evaluate(fit: Fit, quick: bool, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Errors by class, source and metric, with whole sources and with configurations left out."""
    everything = np.ones(len(fit.runs), bool)
    by_source: Array
    shipped = np.log([fitted()[name] for name in fit.names])
    without_source = {run.source: shipped for run in fit.runs}
    without_fold = {_fold(run): shipped for run in fit.runs}
    if fit.runs and not quick:
        start = fit.solve(everything)
        without_source = fit.left_out(source_of, start, _progress)
        without_fold = fit.left_out(_fold, start, _progress)
    by_source = fit.predict_left_out(source_of, without_source)
    by_configuration = fit.predict_left_out(_fold, without_fold)
    forgotten = {name: forget(fit, rows, name, without_source) for name in FORGETTING}
    left_out = {
        "source_left_out": by_source,
        "configuration_left_out": by_configuration,
        **forgotten,
    }

    def by(name_of: Callable[[Run], str]) -> dict[str, NDArray[np.bool_]]:
        names = np.array([name_of(run) for run in fit.runs])
        return {str(name): names == name for name in np.unique(names)}

    def apart(name_of: Callable[[Run], str]) -> dict[str, dict[str, float]]:
        return {name: errors(fit, by_source, members) for name, members in by(name_of).items()}

    return {
        "left_out": "nothing (shipped constants)" if quick else "whole sources",
        "classes": {
            name: {label: errors(fit, constants, members) for label, constants in left_out.items()}
            | {"targets": TARGETS.get(name)}
            for name, members in classes(fit.runs).items()
        },
        "sources": apart(source_of),
        "pipelines": {
            name: errors(fit, by_source, members) for name, members in by(_schedule).items() if name
        },
        "devices": apart(lambda run: run.cluster.device.name),
        "metrics": apart(lambda run: run.metric),
        "ranking": {
            "source_left_out": ranking(fit, by_source),
            "configuration_left_out": ranking(fit, by_configuration),
        },
        "ranking_targets": RANKING_TARGETS,
        "schedules_in_order": schedules_in_order(fit, by_source),
        "defying": defying(fit, by_source),
        "predicted": by_source.tolist(),
    }


def write_constants(fit: Fit) -> None:
    """Fit on every row and write the table, beside what each constant started from."""
    logarithms = fit.solve(np.ones(len(fit.runs), bool))
    sources = len({run.source for run in fit.runs})
    lines = [
        "# Constants of the transformer family, from `python -m benchmarks.published CSV --fit`.",
        f"# Fitted to {len(fit.runs)} configurations of {sources} sources",
        "# at once, from the prior and reason beside each;",
        "# those that no published run touches stay at their prior and are assumed.",
    ]
    for name, value, prior in zip(fit.names, np.exp(logarithms), np.exp(fit.prior), strict=True):
        how = "assumed" if abs(np.log(value / prior)) < 1e-4 else "fitted"
        basis = json.dumps(f"prior {prior:.4g}: {priors()[name][2]}")
        lines.append(f"{name}: {{value: {value:.6g}, how: {how}, basis: {basis}}}")
    target = Path(__file__).parents[1] / "cost_models" / "fitted.yaml"
    target.write_text("\n".join(lines) + "\n")
    fitted.cache_clear()
    fitted_table.cache_clear()


def plot(fit: Fit, predicted: Sequence[float], target: Path) -> None:
    """Predicted over measured step time, by class."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6))
    for name in sorted({run.device_class for run in fit.runs}):
        mask = [run.device_class == name for run in fit.runs]
        axes.scatter(fit.measured[mask], np.array(predicted)[mask], s=10, label=name)
    ends = [fit.measured.min(), fit.measured.max()]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="published step time, s", ylabel="predicted, s")
    axes.legend()
    figure.savefig(target, dpi=150)


def render(result: dict[str, Any], reasons: dict[str, str], fit: Fit) -> str:
    """The report as text."""
    lines = [f"{len(fit.runs)} configurations; left out of the fit: {result['left_out']}", ""]
    lines.append(f"{'class':24s} {'n':>4s} {'median':>8s} {'p90':>7s} {'bias':>7s}   targets")
    for name, entry in result["classes"].items():
        targets = entry["targets"]
        for label, key in (
            (name, "source_left_out"),
            ("  sources undeclared as well", "undeclared"),
            ("  sources untitled as well", "untitled"),
            ("  sources unseen, rules as well", "unseen"),
            ("  by configurations", "configuration_left_out"),
        ):
            by_source = key != "configuration_left_out"
            wanted = "" if targets is None else targets[:2] if by_source else targets[2:]
            lines.append(_line(label, entry[key], wanted))
    memory = result["memory"]
    for label, key in (
        ("peak memory", "all"),
        ("  sources undeclared", "undeclared"),
        ("  sources untitled as well", "untitled"),
        ("  sources unseen, rules as well", "unseen"),
    ):
        lines.append(_line(label, memory[key], memory["targets"][:2]))
    lines += [_line(f"  {name}", memory[name], (MOST_MEMORY,)) for name in AMONG]
    for label, ranks in result["ranking"].items():
        least_tau, most_regret = RANKING_TARGETS[label]
        regret = "" if most_regret is None else f" (at most {most_regret:.0%})"
        lines.append(
            f"ranking, {label.replace('_', ' ')}: {ranks['groups']:.0f} groups, mean tau "
            f"{ranks['mean_tau']:.2f} (at least {least_tau:.2f}), mean regret "
            f"{ranks['mean_regret']:.1%}{regret}"
        )
    right, pairs, sources = result["schedules_in_order"]
    lines.append(
        f"schedules of one layout, pairs more than 3 % apart: {right} of {pairs} in order "
        f"({sources} source{'s' * (sources != 1)})"
    )
    for name, band in result["bands"].items():
        lines.append(
            f"band, {name}: {band['low']:.2f} to {band['high']:.2f} of the prediction covers "
            f"{band['covers']:.0%} of {band['count']:.0f}; taken from other sources, "
            f"{band['covers_source_left_out']:.0%}"
        )
    for title in ("pipelines", "sources", "devices", "metrics"):
        lines += ["", f"by {title} (source left out)"]
        lines += [_line(name[:44], entry, "") for name, entry in result[title].items()]
    lines += ["", "peak memory by source"]
    lines += [_line(name[:44], entry, "") for name, entry in result["memory"]["sources"].items()]
    lines += ["", "rows that defy the model"]
    lines += [f"  {row['error']:+6.0%} {row['id']}: {row['likely']}" for row in result["defying"]]
    lines += ["", f"not priced: {len(reasons)} rows"]
    lines += [f"  {row}: {reason}" for row, reason in reasons.items()]
    return "\n".join(lines)


def _line(name: str, entry: dict[str, float], targets: Any) -> str:
    wanted = "   " + ", ".join(f"{most:.1%}" for most in targets) if targets else ""
    return (
        f"{name:44s} {entry['count']:4.0f} {entry['median']:7.1%} {entry['p90']:7.1%} "
        f"{entry['bias']:+7.1%}{wanted}"
    )


def _schedule(run: Run) -> str:
    """Of dense pipelines the schedule, else nothing."""
    return run.layout.schedule if run.layout.pp > 1 and not run.arch.is_moe else ""


def _fold(run: Run) -> str:
    """One of ten parts, which other rows and the figures have nothing to do with."""
    import hashlib

    return str(int(hashlib.sha256(run.key.encode()).hexdigest(), 16) % 10)


def _progress(label: str) -> None:
    print(f"fitted without {label}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
