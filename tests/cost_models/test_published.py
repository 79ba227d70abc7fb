"""The reader of published rows: defaults for unknown sources, reasons for rows it cannot price."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from autopar.cost_models.bands import bands
from autopar.cost_models.rates import fitted_table
from autopar.cost_models.software import Software
from autopar.planner.family.runs import peak_bytes
from benchmarks.published import main, price_run, read_all, read_rows, row_report
from benchmarks.published_bands import Ratio, coverage, interval, report, write_bands
from benchmarks.published_declarations import Row, declared, rules_of_one_source
from benchmarks.published_fit import Fit, one_per_configuration
from benchmarks.published_priors import priors
from benchmarks.published_rows import Unpriceable, read_run

COLUMNS = (
    "id source source_location model_name architecture params_b layers hidden heads kv_heads "
    "ffn_hidden vocab experts topk seq_len global_batch micro_batch precision device num_devices "
    "devices_per_node interconnect tp pp cp ep dp vpp zero_or_fsdp recompute sequence_parallel "
    "schedule metric_tokens_per_s_per_gpu metric_tflops_per_gpu metric_mfu metric_step_time_s "
    "metric_peak_mem_gib notes"
).split()


def row(**cells: str) -> Row:
    """A made-up run of a 7B model on 8 H100."""
    given = {
        "id": "made-up-1", "source": "nobody's blog", "model_name": "Llama2 7B",
        "architecture": "dense", "params_b": "6.74", "layers": "32", "hidden": "4096",
        "heads": "32", "kv_heads": "32", "ffn_hidden": "11008", "vocab": "32000",
        "seq_len": "4096", "global_batch": "64", "micro_batch": "1", "precision": "bf16",
        "device": "H100-80GB-SXM", "num_devices": "8", "devices_per_node": "8", "tp": "1",
        "pp": "1", "cp": "1", "ep": "1", "dp": "8", "recompute": "none",
        "metric_tokens_per_s_per_gpu": "9000",
    }  # fmt: skip
    return {name: cells.get(name, given.get(name, "")) for name in COLUMNS}


def test_an_unknown_source_gets_the_general_default() -> None:
    run = read_run(row())
    assert run.software == replace(Software(), **declared()["general"]["software"])
    assert run.metric == "tokens/s"
    assert run.measured_s == pytest.approx(64 * 4096 / 8 / 9000)
    assert price_run(run) == pytest.approx(run.measured_s, rel=0.35)


def test_a_name_tells_no_more_than_its_cells() -> None:
    assert price_run(read_run(row())) == price_run(read_run(row(source="another blog")))


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"hidden": "", "model_name": "secret"}, "architecture"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"num_devices": ""}, "number of devices"),
        ({"notes": "OUTLIER: contradicts itself"}, "contradicts"),
        ({"model_name": "Nemotron_3_Nano"}, "hybrid"),
        ({"heads": ""}, "heads is not published"),
        ({"cp": "3"}, "cp 3 x tp 1 x pp 1 does not divide 8 devices"),
        ({"pp": "16", "dp": ""}, "cp 1 x tp 1 x pp 16 does not divide 8 devices"),
        ({"global_batch": "0.5"}, "global_batch 0.5 is not a whole number"),
        ({"global_batch": "0"}, "nothing to train on"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(cells: dict[str, str], says: str) -> None:
    with pytest.raises(Unpriceable, match=says):
        read_run(row(**cells))
    runs, reasons = read_all([row(**cells)])
    report = row_report("made-up-1", runs, reasons)
    assert report["predicted_step_time_s"] is None
    assert report["reason"]


def test_the_devices_of_a_row_are_those_it_names() -> None:
    for cells in ({"dp": "8", "cp": "2"}, {"dp": "64"}, {"dp": "0"}, {"dp": ""}):
        assert read_run(row(**cells)).layout.device_count == 8


def test_json_rows_carry_the_band() -> None:
    runs, reasons = read_all([row()])
    report = row_report("made-up-1", runs, reasons)
    low, high = report["band"]["step_time_s"]
    assert low < report["predicted_step_time_s"] < high
    assert report["reason"] is None
    assert 10 < report["predicted_peak_mem_gib"] < 200


def test_repeated_configurations_count_once_and_the_latest_speaks() -> None:
    rows = [
        row(id="old", notes="container=25.09; task=pretrain", metric_tokens_per_s_per_gpu="8000"),
        row(id="new", notes="container=26.04; task=pretrain", metric_tokens_per_s_per_gpu="9500"),
    ]
    runs, _ = read_all(rows)
    assert [run.id for run in one_per_configuration(runs)] == ["new"]


def test_every_declaration_has_a_reason() -> None:
    data = declared()
    for section in ("rules", "sources", "words", "clusters", "unpriced"):
        assert all(entry["reason"] for entry in data[section])


def test_constants_are_named_after_physics_not_sources() -> None:
    assert set(priors()) == set(fitted_table())
    for name in fitted_table():
        for source in ("megatron", "nemo", "foundry", "bloom", "simumax", "nanotron", "maxtext"):
            assert source not in name


def test_the_fit_recovers_constants() -> None:
    runs, _ = read_all(
        [
            row(id=str(i), seq_len=str(seq), global_batch=str(8 * batch), micro_batch=str(micro))
            for i, (seq, batch, micro) in enumerate(
                [(2048, 4, 1), (4096, 8, 2), (16384, 4, 1), (8192, 8, 1), (8192, 16, 2)]
            )
        ]
    )
    fit = Fit(runs)
    truth = fit.prior.copy()
    truth[fit.names.index("matmul_hopper")] += np.log(0.9)
    fit.measured = fit.predict(truth)
    predicted = fit.predict(fit.solve(np.ones(len(runs), bool)))
    assert predicted == pytest.approx(fit.measured, rel=0.03)


def test_the_report_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, [row(), row(id="bad", device="abacus")]), "--quick"]) == 0
    text = capsys.readouterr().out
    assert "dense, A100 and H100" in text
    assert "sources undeclared as well" in text
    assert "mean tau 0.00 (at least 0.60), mean regret 0.0% (at most 3%)" in text
    assert "not priced: 1 rows" in text


def written(tmp_path: Path, rows: list[Row]) -> str:
    import csv

    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return str(tmp_path / "rows.csv")


def test_few_rows_do_not_replace_the_constants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[Fit] = []
    monkeypatch.setattr("benchmarks.published.write_constants", fits.append)
    few = written(tmp_path, [row(), row(id="other", global_batch="128")])
    with pytest.raises(SystemExit):
        main([few, "--fit", "--quick"])
    says = capsys.readouterr().err
    assert "2 timed configurations of 1 sources" in says
    assert "60 of 5 are the least" in says
    assert "--force" in says
    assert not fits
    assert main([few, "--fit", "--quick", "--force"]) == 0
    assert len(fits) == 1


@pytest.mark.parametrize("gone", [c for c in COLUMNS if c not in ("id", "device", "hidden")])
def test_a_missing_column_is_an_empty_cell(gone: str) -> None:
    empty, missing = row(**{gone: ""}), row()
    del missing[gone]
    assert read_all([missing])[1] == read_all([empty])[1]
    runs = [read_all([cells])[0] for cells in (empty, missing)]
    assert [price_run(run) for run in runs[0]] == [price_run(run) for run in runs[1]]


def test_every_line_of_a_file_has_an_id(tmp_path: Path) -> None:
    lines = ["\ufeffid,device", "a,H100", ",H100", "a,H100,more,cells", "b"]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    rows = read_rows(tmp_path / "rows.csv")
    assert [r["id"] for r in rows] == ["a", "(line 3)", "a (line 4)", "b"]
    runs, reasons = read_all(rows)
    assert not runs
    assert [row_report(r["id"], runs, reasons)["reason"] for r in rows[:3]] == [
        "architecture figures are not published"
    ] * 3


@pytest.mark.parametrize(
    ("device", "links_bytes_per_s"),
    [
        ("H100-80GB-SXM", 450e9),
        ("H100-PCIe", 25e9),
        ("A100-80GB-PCIe", 25e9),
        ("H800-80GB-SXM", 200e9),
        ("H20", 450e9),
        ("H200-141GB-SXM", 450e9),
        ("RTX-4090", 25e9),
        ("TPU-v5e", 180e9),
        ("TPU-v5p", 540e9),
    ],
)
def test_a_device_without_a_network_cell_has_its_own_links(
    device: str, links_bytes_per_s: float
) -> None:
    assert read_run(row(device=device)).cluster.levels[0].bandwidth_bytes_per_s == links_bytes_per_s


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"experts": "8"}, "how many experts a token visits"),
        ({"topk": "2"}, "number of experts"),
        ({"experts": "8", "topk": "0"}, "how many experts a token visits"),
    ],
)
def test_experts_that_no_token_visits_are_not_priced(cells: dict[str, str], says: str) -> None:
    with pytest.raises(Unpriceable, match=says):
        read_run(row(architecture="moe", **cells))


def test_a_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere.csv"])
    assert "nowhere.csv" in capsys.readouterr().err


def test_cells_that_cannot_be_read_are_a_reason_too() -> None:
    runs, reasons = read_all([row(layers="many")])
    assert not runs
    assert "cannot be read" in reasons["made-up-1"]


def test_named_modules_are_what_runs_again() -> None:
    runs = [read_run(row(recompute=text)) for text in ("none", "selective(norm, act)", "full")]
    assert runs[1].layout.recompute.modules == ("layernorm", "moe_act")
    seconds = [price_run(run) for run in runs]
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("spelled", ["bf16 (amp)", "bf16 (TE)", "bf16-mixed", "bf16+SR", "BF16"])
def test_a_precision_is_its_dtype_however_it_is_spelled(spelled: str) -> None:
    plain, other = read_run(row()), read_run(row(precision=spelled))
    assert price_run(other) == price_run(plain)
    sizes = [peak_bytes(r.priced) for r in (plain, other)]
    assert sizes[0] == sizes[1]


def test_narrow_products_are_faster_and_save_less() -> None:
    names = ("bf16", "mxfp8", "fp8 (TE)", "mxfp4")
    runs = [read_run(row(device="B200", precision=name)) for name in names]
    wide, *narrow = (price_run(run) for run in runs)
    assert all(seconds < wide for seconds in narrow)
    whole, *parts = (peak_bytes(r.priced) for r in runs)
    assert all(size < whole for size in parts)


def test_a_source_may_say_how_it_counts_attention() -> None:
    cells = {"metric_tokens_per_s_per_gpu": "", "metric_tflops_per_gpu": "400"}
    whole = read_run(row(**cells)).measured_s
    causal = read_run(row(source="Megatron-MoE-ModelZoo best practice", **cells)).measured_s
    assert whole is not None
    assert causal is not None
    assert causal < 0.97 * whole


def test_bands_are_what_the_residuals_say(tmp_path: Path) -> None:
    name = "peak memory"
    ratios = [Ratio(name, f"source {i % 5}", 0.9 + 0.01 * i) for i in range(21)]
    write_bands(ratios, tmp_path / "bands.yaml")
    written = yaml.safe_load((tmp_path / "bands.yaml").read_text())
    assert written[name]["low"] == pytest.approx(0.92)
    assert written[name]["high"] == pytest.approx(1.08)
    assert set(written) == set(bands())
    assert report(ratios)[name]["count"] == 21


def test_coverage_does_not_look_at_its_own_source() -> None:
    alike = [Ratio("moe", str(i), 1.0 + 0.01 * (i % 10)) for i in range(100)]
    far_off = [Ratio("moe", "far off", 2.0 + 0.1 * i) for i in range(25)]
    low, high = interval([*alike, *far_off])
    assert sum(low <= ratio.value <= high for ratio in far_off) > 5
    assert coverage([*alike, *far_off]) * 125 <= 100


def test_no_rule_is_keyed_to_a_source() -> None:
    for section in ("rules", "words"):
        for entry in declared()[section]:
            assert not {"source", "source_location", "id"} & set(entry["match"]), entry
            assert entry["reason"]


def test_a_renamed_source_keeps_what_its_rows_say() -> None:
    known = row(source="Megatron-Bridge performance summary", architecture="moe", experts="8",
                topk="2", ep="8", pp="2", dp="4", vpp="2", notes="container=26.08")  # fmt: skip
    renamed = {**known, "id": "renamed", "source": "Somebody's table"}
    runs, reasons = read_all([known, renamed])
    assert not reasons
    assert runs[1].software == read_run(known, "bare").software == read_run(known, "named").software
    plain = read_run({**renamed, "notes": ""}).software
    assert (plain.graphs, runs[1].software.graphs) == (False, True)


@pytest.mark.parametrize(
    ("cells", "software"),
    [
        ({"notes": "torchtitan log"}, {"states": "fsdp", "memory": "reserved", "loss": "eager"}),
        ({"source_location": "torchtitan, 2025-06"}, {"memory": "reserved", "loss": "fused"}),
        ({"source": "a talk on torchtitan"}, {"states": "fsdp", "memory": "reserved"}),
        ({"zero_or_fsdp": "FSDP full shard"}, {"states": "fsdp", "memory": "allocated"}),
        ({"zero_or_fsdp": "DDP/dist-opt (FSDP=0)"}, {"states": "megatron"}),
        ({"zero_or_fsdp": "ZeRO-3"}, {"states": "deepspeed"}),
        ({"precision": "fp16"}, {"attention": "unfused", "dropout": True, "dp_overlap": False}),
        ({"precision": "fp8 (TE)"}, {"attention": "flash_new"}),
        ({"notes": "max_memory_reserved worst rank"}, {"memory": "reserved"}),
        ({"notes": "incl. CUDA context"}, {"memory": "device"}),
        ({"notes": "max_memory_allocated of rank 0"}, {"memory": "allocated"}),
        ({"notes": "FA3"}, {"attention": "flash_new"}),
        ({"notes": "SDPA flash v2", "device": "B200"}, {"attention": "flash"}),
        ({"notes": "Liger kernels"}, {"loss": "chunked"}),
        ({"notes": "MaxText on GPU"}, {"graphs": True, "states": "fsdp"}),
        ({"notes": "NO comm overlap (TP/PP)"}, {"tp_overlap": False, "dp_overlap": False}),
        ({"notes": "container=26.04"}, {"graphs": True, "tp_overlap": True, "gradient_bytes": 2}),
    ],
    ids=str,
)
def test_what_a_row_says_decides_its_software(
    cells: dict[str, str], software: dict[str, object]
) -> None:
    run = read_run(row(**cells))
    assert {name: getattr(run.software, name) for name in software} == software


def test_the_title_is_left_out_where_nothing_is_to_be_known_of_it() -> None:
    titled = row(source="a talk on torchtitan", source_location="github:pytorch/torchtitan")
    assert read_run(titled, "named").software.selective == "ops"
    assert read_run(titled, "bare").software == read_run(row()).software
    assert read_run(titled, "bare").source == "a talk on torchtitan"


def test_rules_that_one_source_meets_are_told() -> None:
    rows = [
        row(id="a", source="one", notes="torchtitan; container=26.04"),
        row(id="b", source="two", notes="container=26.04", zero_or_fsdp="FSDP"),
    ]
    alone = rules_of_one_source(rows)
    rules = declared()["rules"]
    titan = next(i for i, e in enumerate(rules) if "torchtitan" in e["match"].get("anywhere", ""))
    assert titan in alone["one"]
    assert titan not in alone["two"]
    assert read_run(rows[0], "bare", alone["one"]).software.selective == "attention"


@pytest.mark.parametrize(
    ("cells", "ranks"),
    [({"ep": "4"}, 4), ({"ep": "4", "notes": "EDP=1 ETP=2"}, 8), ({"ep": "1"}, 2)],
    ids=str,
)
def test_experts_are_whole_where_recipes_leave_them_so(cells: dict[str, str], ranks: int) -> None:
    moe = {"architecture": "moe", "experts": "8", "topk": "2", "tp": "2", "dp": "4"}
    assert read_run(row(**{**moe, **cells})).layout.expert_ranks == ranks


@pytest.mark.parametrize(
    ("cells", "size"),
    [
        ({"seq_len": "512", "global_batch": "1024"}, 16),
        ({"seq_len": "512", "global_batch": "16"}, 2),
        ({"pp": "8", "dp": "1", "global_batch": "16"}, 1),  # the bubble would grow
        ({"seq_len": "32768"}, 1),  # two do not fit
        ({"device": "TPU-v5p", "global_batch": "8"}, 1),
        ({"global_batch": ""}, 1),
    ],
    ids=str,
)
def test_a_micro_batch_that_is_not_named_is_the_likely_one(
    cells: dict[str, str], size: int
) -> None:
    run = read_run(row(**{"micro_batch": "", **cells}))
    assert run.layout.microbatch == size


def test_a_local_batch_is_cut_into_as_many_microbatches_as_there_are_pipeline_ranks() -> None:
    notes = "local batch size 32 per DP rank, microbatch not stated"
    run = read_run(row(zero_or_fsdp="FSDP2", pp="8", micro_batch="", notes=notes))
    assert run.layout.microbatch == 4
    assert run.layout.zero == 1


def test_what_does_not_fit_was_not_run() -> None:
    large = {"layers": "96", "hidden": "12288", "heads": "96", "kv_heads": "96",
             "ffn_hidden": "49152", "params_b": "175", "num_devices": "64", "tp": "8", "pp": "8",
             "dp": "1", "micro_batch": "4"}  # fmt: skip
    assert read_run(row(**large, recompute="")).layout.recompute.policy == "full"
    assert read_run(row(**large)).layout.recompute.policy == "none"
    assert read_run(row(recompute="")).layout.recompute.policy == "none"


@pytest.mark.parametrize(
    "cells",
    [
        {name: ""}
        for name in ("seq_len", "global_batch", "micro_batch", "precision", "tp", "dp", "vocab")
    ]
    + [
        {"heads": "0"}, {"num_devices": "0"}, {"layers": "-3"}, {"tp": "0"}, {"hidden": "nan"},
        {"micro_batch": "0"}, {"seq_len": "1e400"}, {"experts": "8", "architecture": "moe"},
        {"precision": "int3"}, {"recompute": "some of it"}, {"metric_tokens_per_s_per_gpu": "0"},
        {"metric_peak_mem_gib": "-1"}, {"pp": "3"}, {"interconnect": "carrier pigeon"},
    ],
    ids=str,
)  # fmt: skip
def test_odd_cells_are_priced_or_explained(cells: dict[str, str]) -> None:
    runs, reasons = read_all([row(**cells)])
    report = row_report("made-up-1", runs, reasons)
    priced = report["predicted_step_time_s"]
    assert (priced is None) == (report["reason"] is not None)
    assert priced is None or 0 < priced < float("inf")
    memory = report["predicted_peak_mem_gib"]
    assert priced is None or 0 < memory < float("inf")


def test_what_a_source_says_of_itself_corrects_a_cell() -> None:
    cells = {
        "source": "tpu-recipes training READMEs",
        "model_name": "GPT-3 175B",
        "device": "TPU-v5p",
        "num_devices": "512",
        "recompute": "",
        "metric_step_time_s": "22.2",
    }
    run = read_run(row(**cells))
    assert (run.precision, run.layout.tp, run.timed) == ("int8", 1, True)  # tp is no empty cell
    assert read_run(row(**cells), "named").precision == "bf16"
    assert not read_run(row()).timed


def test_int8_has_a_peak_of_its_own_where_the_device_has_one() -> None:
    cells = {"device": "TPU-v6e", "num_devices": "256", "dp": "256", "global_batch": "768"}
    wide, narrow = (price_run(read_run(row(**cells, precision=p))) for p in ("bf16", "int8"))
    assert narrow < 0.9 * wide
    assert price_run(read_run(row(precision="int8"))) >= price_run(read_run(row()))


def test_what_maxtext_keeps_is_what_does_not_run_again() -> None:
    cells = {"device": "TPU-v6e", "num_devices": "256", "dp": "256", "global_batch": "768"}
    kept = read_run(row(**cells, recompute="qkv_proj_offloaded"))
    assert "out_proj" in kept.layout.recompute.modules
    none, full = (price_run(read_run(row(**cells, recompute=r))) for r in ("none", "full"))
    assert none < price_run(kept) < full
    part = read_run(row(**cells, recompute="selective(qkv_proj, out_proj, mlp_in)"))
    assert none < price_run(part) < price_run(kept)
