"""A run that loses and regains slices many times, unattended.

The suite `soak` of the benchmarks has ten times as many events, and a larger model.
"""

import pytest

from benchmarks import simulation, soak
from tests import runs, shared_memory

EVENTS = 10
SEED = 13


@pytest.mark.night
def test_no_example_and_no_committed_step_is_lost(tmp_path, corpus):
    listed = soak.faults(EVENTS, SEED)
    kinds = {kind for fault in listed for kind in fault}
    assert kinds > {"kill_slice", "return_slice", "kill_host", "hang_host"}
    config = runs.write_config(tmp_path, corpus, global_batch_size=24)
    with shared_memory.directory("soak") as ram:
        outcome = soak.soak(str(tmp_path), ram, config, listed)
    assert outcome.audit["passed"]
    assert (outcome.audit["num_lost"], outcome.audit["num_repeated"]) == (0, 0)
    assert outcome.committed_steps_lost() == 0
    assert outcome.processes_left == []
    # Two faults may fall into one change.
    assert len(outcome.named("recovered")) >= EVENTS / 2
    assert outcome.events[-1]["event"] == "run_finished"
    simulated = simulation.simulated(tmp_path / "soak")
    assert simulated.steps == outcome.events[-1]["step"]
    assert simulated.losses >= EVENTS / 4
