"""Runs in buckets, killed with SIGKILL at random moments: no committed step is lost.

The suite `soak_buckets` of the benchmarks kills them twenty times.
"""

import pytest

from benchmarks import soak_buckets

KILLS = 6


@pytest.mark.night
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_a_run_that_is_killed_at_random_loses_no_committed_step(
    bucket, tmp_path, corpus
):
    outcome = soak_buckets.soak(bucket, tmp_path, corpus, num_kills=KILLS, seed=7)
    assert not outcome.failed
    assert outcome.committed_steps_lost() == 0
    assert not any(each.incomplete for each in outcome.kills)
    # One step that was uploaded, and one that was removed.
    assert all(len(each.leftovers) <= 2 for each in outcome.kills)
    assert outcome.leftover_ratio() <= 1
