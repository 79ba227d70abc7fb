"""Fourier transforms in programs: complex numbers are pairs, what is transformed stays whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.emit.test_rewrites import Changed

fft = torch.fft
WINDOW = torch.hann_window(6)
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "real part of two dims": lambda x: fft.fftn(x, dim=(1, 2)).real,
    "pairs": lambda x: torch.view_as_real(fft.fft(x)),
    "there and back": lambda x: fft.ifft(fft.fft(x, dim=1), dim=1).real,
    "a filter": lambda x: fft.irfft(
        fft.rfft(x, dim=1) * torch.linspace(1, 2, 4)[:, None], n=6, dim=1
    ),
    "a longer one": lambda x: fft.irfft(fft.rfft(x, n=12, dim=1), n=12, dim=1)[:, :6],
    "a shorter one": lambda x: torch.view_as_real(fft.rfft2(x, s=(4, 10), norm="ortho")),
    "of real numbers back": lambda x: fft.ifft(x, dim=1).imag,
    "hermitian": lambda x: fft.hfft(torch.complex(x, x), dim=2, norm="forward"),
    "sizes of the last dims": lambda x: fft.fftn(x, s=(7, 5)).imag,
    "short-time": lambda x: torch.stft(
        x.flatten(1), 8, 4, 6, WINDOW, pad_mode="reflect", return_complex=True
    ).abs(),
    "short-time, whole frames alone": lambda x: (
        torch.stft(
            x.flatten(1),
            8,
            3,
            5,
            WINDOW[1:],
            center=False,
            normalized=True,
            onesided=False,
            return_complex=True,
        ).imag
    ),
    "all dims of a part": lambda x: torch.stack(
        [fft.ihfftn(x[:, :, i::2], dim=(1, 2)).real for i in (0, 1)]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_transform(name: str) -> None:
    """Of x [4, 6, 8], on one device and split at random."""

    def model() -> Changed:
        torch.manual_seed(0)
        return Changed(CHANGES[name])

    made = capture_of(model, lambda: {"x": torch.zeros(4, 6, 8)})
    batch = {"x": torch.randn(4, 6, 8)}
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2", "tp=4")):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed)), model(), batch)
    check(emitted(made, Spread(Mesh((), ()))), model(), batch)


def test_as_a_person_writes_it() -> None:
    made = capture_of(
        lambda: Changed(CHANGES["real part of two dims"]), lambda: {"x": torch.zeros(4, 6, 8)}
    )
    text = emitted(made, Spread(Mesh((), ()))).text
    assert "torch.view_as_real(torch.fft.fftn(self.fc(x), dim=(1, 2)))[..., 0]" in text


def test_in_half_precision_it_is_computed_in_float32() -> None:
    made = capture_of(lambda: Changed(CHANGES["pairs"]), lambda: {"x": torch.zeros(4, 6, 8)})
    half = emitted(made, Spread(Mesh((), ())), precision="bfloat16")
    assert "torch.view_as_real(torch.fft.fft(self.fc(x).float())).bfloat16()" in half.text
