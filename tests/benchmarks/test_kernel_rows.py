"""Rows of published kernels: how a file is read, what is priced, and how it is judged."""

import json
from pathlib import Path

import pytest

from benchmarks.kernel_fit import fit
from benchmarks.kernel_judgement import classes, gains, overlaps, prices, unpriced
from benchmarks.kernel_microbench import read_microbench
from benchmarks.kernel_prices import measured_s
from benchmarks.kernel_rows import device_of, family, read_kernel_rows
from benchmarks.published_kernels import has_ids, main

HEADER = (
    "id,kind,device,dtype,shape,provider,way,baseline_id,time_ms,memory_mb,rate,unit,notes,source\n"
)
ROWS = """\
loss-1,chunked_loss,A100-SXM-80GB,bf16,kernel=fused_linear_cross_entropy;H=4096;V=128256;BT=4096,\
liger,full,,121.431,4245.55,,,,
norm-1,fused_norm,H100-SXM-80GB,fp32,kernel=layer_norm;M=4096;N=4096,huggingface,fwd,,0.0662,,,,,
product-1,fp8_linear,B200,bf16,"M=8192;N=8192;K=8192",trtllm-1,fwd,,0.737152,,,,,ai-dynamo/x
product-2,fp8_linear,H100 (presumed),bf16|fp8_block,"M=4096;N=4096;K=4096",torch_bf16,fwd,,,,\
600,TFLOP/s,,
attention-1,attention,B200,bf16,headdim=128;seq=4096;batch=1;heads=32;causal=1,fa4,fwd,,,,\
1000,TFLOP/s,,
gather-1,collective,H200-SXM,fp16,op=all_gather;bytes=8388608;ranks=8,nccl-2,fwd,,0.0432,,,,,
plain,tp_overlap,H100,bf16,op=gemm+reduce_scatter;M=1024;N=4096;K=14336;ranks=8,cublas+nccl,fwd,,\
0.223621,,,,,
pieces,tp_overlap,H100,bf16,op=gemm+reduce_scatter;M=1024;N=4096;K=14336;ranks=8,torch_async_tp,\
fwd,plain,0.666917,,,,,
step-1,end_to_end,B200,bf16|mxfp8,model=llama3_8b;fsdp=4;local_batch=32;seq=2048,torchtitan;bf16,\
full,,,,20000,tokens/s/device,,
step-2,end_to_end,B200,bf16|mxfp8,model=llama3_8b;fsdp=4;local_batch=32;seq=2048,\
torchtitan;mxfp8,full,step-1,,,25000,tokens/s/device,,
odd-1,fused_norm,Abacus 9,bf16,kernel=rms_norm;M=8;H=8,liger,fwd,,1,,,,,
odd-2,weaving,H100,bf16,M=8,loom,fwd,,1,,,,,
odd-3,fused_norm,H100,bf16,kernel=rms_norm;M=8,liger,fwd,,1,,,,,
odd-4,fused_norm,H100,bf16,kernel=rms_norm;M=8;H=8,somebody,fwd,,1,,,,,
odd-5,fused_norm,H100,bf16,kernel=rms_norm;M=8;H=8,liger,fwd,,1,,,,OUTLIER,
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "kernels.csv"
    file.write_text("\ufeff" + HEADER + ROWS, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("text", "name", "left_out"),
    [
        ("A100-SXM-80GB", "A100-80GB", "A100"),
        ("A100 PCIe", "A100-80GB-PCIe", "A100"),
        ("H100-class (not stated)", "H100", "H100"),
        ("H100-PCIe-80GB", "H100-PCIe", "H100"),
        ("H100-HBM2e-96GB-500W (95 GiB; presumed)", "H100-96GB", "H100"),
        ("H200-SXM", "H200", "H200"),
        ("H800", "H100", "H800"),
        ("L20-PCIe", "L20", "L20"),
        ("Blackwell (184 GiB)", "GB200", "GB200"),
        ("MI300X-class (gfx942)", "MI300X", "MI300X"),
        ("Abacus 9", None, "Abacus 9"),
    ],
)
def test_devices_by_their_spellings(text: str, name: str | None, left_out: str) -> None:
    device = device_of(text)
    assert (device and device.name) == name
    assert family(text) == left_out


def test_rows_are_read_and_priced_or_counted(table: Path) -> None:
    rows = read_kernel_rows(table)
    predicted = prices(rows)
    assert len(rows) == len(predicted) == 15
    assert rows[0].memory_bytes == pytest.approx(4245.55 * 2**20)
    for row in rows[:6]:
        measured, time_s = measured_s(row), predicted[row.id].time_s
        assert measured is not None
        assert time_s == pytest.approx(measured, rel=0.35), row.id
    assert predicted["loss-1"].memory_bytes == pytest.approx(rows[0].memory_bytes, rel=0.04)
    reasons = unpriced(predicted)
    assert sum(reasons.values()) == 5
    for part in ("Abacus 9", "weaving", "no H in its shape", "somebody", "contradicts itself"):
        assert any(part in reason for reason in reasons), part


def test_gains_are_judged_by_pairs(table: Path) -> None:
    rows = read_kernel_rows(table)
    predicted = prices(rows)
    assert overlaps(rows, predicted) == [False]
    (points,) = gains(rows, predicted)
    assert points < 0.15
    by_name = {judged.name: judged for judged in classes(rows, predicted)}
    assert by_name["chunked loss"].errors[0] < 0.15
    assert by_name["overlap gains, wrong of all"].data()["met"] is True
    assert by_name["all_to_all"].data()["n"] == 0


def test_the_report_and_its_rows(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_ids(table)
    monkeypatch.setattr("sys.argv", ["published_kernels", str(table)])
    main()
    text = capsys.readouterr().out
    assert "chunked loss, memory" in text
    assert "not priced: 5 of 15 rows" in text
    monkeypatch.setattr("sys.argv", ["published_kernels", str(table), "--json"])
    main()
    data = json.loads(capsys.readouterr().out)
    rows = {row["id"]: row for row in data["rows"]}
    assert len(rows) == 15
    assert rows["loss-1"]["predicted_memory_mb"] == pytest.approx(4245.55, rel=0.04)
    assert rows["norm-1"]["predicted_memory_mb"] is None
    assert rows["odd-1"]["predicted_time_ms"] is None
    assert "catalogue" in rows["odd-1"]["reason"]


def test_a_table_of_rates_is_rows_too(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text(
        "kind,device,details,size,value,unit,source\n"
        "gemm,B200,XLA,M4096 N4096 K4096,1400,TFLOP/s,github:ROCm/xla:x\n"
        "attention_bwd,B200,,batch=1 seq_len=4096 head_num=8 kv_head_num=2 qk_head_dim=128 "
        "v_head_dim=128,900,TFLOP/s,github:a/b:c\n"
        "grouped_gemm,B200,,ng=8 M=1024 N=4096 K=4096,900,TFLOP/s,github:a/b:c\n"
        "collective,B200,ring,1 MB,100,GB/s,x\n"
    )
    assert not has_ids(file)
    rows = read_microbench(file)
    assert [row.kind for row in rows] == ["product", "attention", "grouped_gemm"]
    assert [row.id for row in rows] == ["line-2", "line-3", "line-4"]
    assert all(p.time_s for p in prices(rows).values())


def test_a_fit_finds_the_wire_and_keeps_what_rows_do_not_say(table: Path) -> None:
    slow = HEADER + "".join(
        f"g{size}-{n},collective,H200-SXM,fp16,op=all_gather;bytes={size};ranks={n},nccl-2,fwd,,"
        f"{1e3 * (size * (n - 1) / n / (0.6 * 450e9) + size / n / 1e12)},,,,,\n"
        for size in (2**27, 2**28, 2**29, 2**30)
        for n in (4, 8)
    )
    table.write_text(slow)
    names = {"nccl_wire": 0.8, "own_copy_bytes_per_s": 1e12, "narrow_fp8": 0.9}
    fixed = {"nccl_base_s": 6e-6, "nccl_base_hopper_s": 6e-6, "nccl_hop_s": 1e-6,
             "nccl_piece_s": 1e-6, "nccl_pieces_most_s": 1e-6}  # fmt: skip
    constants = {name: {"value": value} for name, value in {**names, **fixed}.items()}
    values = fit(read_kernel_rows(table), constants)
    assert values["nccl_wire"] < 0.75
    assert values["narrow_fp8"] == 0.9
