"""Groups of one plan end before the next is verified in the same processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.runtime.pytorch.ranks import Ranks
from autopar.torch_private.distributed import end_groups, fake_store


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("fake", rank=0, world_size=8, store=fake_store())
    try:
        yield Ranks({"dp_shard": 2, "cp": 2, "tp": 2})
    finally:
        dist.destroy_process_group()


def test_all_but_the_group_of_all_ranks_end(ranks: Ranks) -> None:
    every, own = dist.group.WORLD, ranks.group("tp")
    assert own is not None
    end_groups()
    assert dist.group.WORLD is every
    assert dist.get_world_size() == 8
    with pytest.raises(ValueError, match="Group"):
        dist.get_rank(own)
    again = Ranks({"dp_shard": 2, "cp": 2, "tp": 2}).group("tp")
    assert again is not own
    assert dist.get_world_size(again) == 2
