"""What NCCL itself does where ranks share a GPU. Where this fails, nothing else here means anything."""

from __future__ import annotations

import pytest

from ithaca.observe.profiler.links import check_collectives

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_collective_at_every_size(ranks, world: int):
    """LL128, one of NCCL's protocols, failed it: see base/gpu_sharing.py."""
    ranks.run(check_collectives, "cuda", tuple(4 << power for power in range(10, 27, 2)), world=world)
