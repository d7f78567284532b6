"""The suite `tiers` of the benchmarks runs; what it finds is for another day."""

import pytest

from benchmarks import tiers


@pytest.mark.night
def test_the_suite_of_tiers_runs_and_replicas_send_nothing():
    figures = tiers.measure(tiers.SMALL)
    assert figures["dp_bytes_sent"].samples == (0,)
    assert figures["sharded_bytes_sent"].value > 0
    assert {
        "save_block_ratio_copy",
        "save_block_ratio_orbax",
        "small_backup_ratio_orbax",
        "huge_block_ratio_orbax_kept",
        "huge_block_and_step_ratio_orbax_donated",
        "huge_memory_mib_donated_ours",
        "ram_restore_ratio_copy",
        "ram_restore_half_hosts",
        "ram_restore_ratio_orbax",
        "check_cost_percent_save",
        "check_cost_percent_load",
        "peer_ratio_curl",
        "start_ms_beside_40000_fake_steps",
    } <= figures.keys()
