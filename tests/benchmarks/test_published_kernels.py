"""`benchmarks.published_kernels`: rows of a file of measured kernels, and what is said of them."""

from pathlib import Path

import pytest

from benchmarks.published_kernels import predicted_s, read, summary

TABLE = """\
kind,device,details,size,value,unit,source
gemm,H100-class (sm_90),"bf16 in, bf16 out, b=1",M2048 N1024 K4096,400,TFLOP/s,somewhere
gemm,B200,fast,b=2 m=4096 k=4096 n=1536 layout=TN accumulate=False,1000,TFLOP/s,somewhere
attention_bwd,B200,,batch=1 seq_len=4096 head_num=8 kv_head_num=2 qk_head_dim=64 v_head_dim=32,\
900,TFLOP/s,
collective,H100-class (sm_90),ring,1 MB,100,GB/s,somewhere
gemm,Abacus,unknown,M2 N2 K2,1,TFLOP/s,somewhere
"""


def test_rows_are_read_with_their_sizes(tmp_path: Path) -> None:
    file = tmp_path / "kernels.csv"
    file.write_text(TABLE)
    one, two, attention = read(file)
    assert one.flops == 2.0 * 2048 * 1024 * 4096
    assert one.measured_s == pytest.approx(one.flops / 400e12)
    assert one.thinness == pytest.approx(1 / 2048 + 1 / 1024 + 1 / 4096)
    assert two.flops == 2 * 2.0 * 4096 * 4096 * 1536
    whole = 2.5 * 2 * 4096**2 * 8 * (64 + 32)
    assert (attention.flops, attention.head_dim) == (whole / 2, 64)
    assert (one.rows, attention.rows) == (0, 4096 * 8)
    assert attention.measured_s == pytest.approx(whole / 900e12)
    rows = {(row["device"], row["kernel"]): row for row in summary([one, two, attention])}
    assert set(rows) == {("H100", "matmul"), ("B200", "matmul"), ("B200", "attention")}
    assert rows["H100", "matmul"]["bias"] == pytest.approx(predicted_s(one) / one.measured_s - 1)
