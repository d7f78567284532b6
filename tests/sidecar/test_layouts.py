"""Under one controller, steps of another layout are read from persistent storage."""

import pytest

from elastic_ckpt.core import errors
from tests.processes import tier_worlds
from tests.processes.test_layout_tiers import NUM_BYTES, STEP, load, restored
from tests.sidecar import simulated_hosts


@pytest.mark.slow
def test_a_step_in_storage_is_read_through_a_layout(machines, tmp_path):
    options = {"persistent": str(tmp_path / "steps")}
    with simulated_hosts.world(machines, 2, **options) as (checkpointer, mesh, listed):
        tier_worlds.save(checkpointer, mesh, steps=[STEP], sharded=True)
        load(checkpointer, mesh)
    assert restored(listed)["persistent_bytes"] == NUM_BYTES


@pytest.mark.slow
def test_a_step_in_the_ram_of_hosts_alone_is_refused_with_the_remedy(machines):
    with simulated_hosts.world(machines, 2) as (checkpointer, mesh, _):
        tier_worlds.save(checkpointer, mesh, steps=[STEP], sharded=True)
        with pytest.raises(errors.CheckpointError, match=r"RAM of .*force=True"):
            load(checkpointer, mesh)
