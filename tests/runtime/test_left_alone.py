"""What ranks have pieces of, DistributedDataParallel leaves alone: in a module, or the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.torch_private.distributed import ddp_ignores


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(4))
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x + self.places)).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [["places"], ["first.weight"], ["places", "second.weight"]])
def test_it_reduces_all_others(names: list[str], tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        model = Model()
        ddp_ignores(model, names)
        parallel = DistributedDataParallel(model, init_sync=False)
        seen: set[int] = set()

        def reduced(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            seen.update(id(p) for p in bucket.parameters())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        parallel.register_comm_hook(None, lambda _, bucket: reduced(bucket))
        torch.autograd.backward(parallel(torch.ones(4)))
        assert {n for n, p in model.named_parameters() if id(p) not in seen} == set(names)
    finally:
        dist.destroy_process_group()
