"""A live run restores a corrupt step from RAM, and diverges later: it goes back."""

import numpy as np
import pytest

from tests.processes import callbacks, claims, great_runs

# What it reads until it goes back in the end.
READ = callbacks.PLANTED_STEP + 1


def mixture(directory):
    """A shuffled and packed mixture."""
    return great_runs.mixture(directory) | {
        "enable_data_shuffling": True,
        "grain_shuffle_buffer_size": 8,
    }


@pytest.mark.slow
class TestDiverged(claims.Claims):
    scenario = great_runs.Scenario(
        drive=lambda run: run.train("steps=28"),
        training=mixture,
        settings={
            "local_checkpoint_period": 2,
            "multi_tier_checkpointing_backup_interval_steps": 4,
            # The step before a fault is complete when the fault comes.
            "async_checkpointing": False,
            "training_callbacks": callbacks.named(callbacks.poisoned_and_planted),
            "elastic_min_slice_count": 2,
        },
        faults=[{"kill_host": 1, "at_step": 11}],
        tells=[
            "slice_lost 1",
            "restore_distrusted the loss is nan",
            "divergence_found planted",
            "rolled_back 1",
        ],
        verdicts=["host_killed"],
        from_memory=False,
    )

    def test_it_goes_back_to_storage_and_repeats_the_rows_of_a_corrupt_step(self, run):
        (event,) = run.events("restore_distrusted")
        assert (event["step"], event["restored_step"]) == (11, 10)
        # Whether step 8 was backed up before the fault depends on the machine.
        assert event["to_step"] in (4, 8)
        starts = [attempt.start_step for attempt in run.attempts]
        assert starts[:3] == [0, 10, event["to_step"]]

    def test_it_leaves_out_what_it_had_read_since_the_step_that_it_goes_back_to(
        self, run
    ):
        (event,) = run.events("rolled_back")
        to = event["to_step"]
        assert event["rows"] == (READ - to) * 12
        assert run.attempts[-1].left_out == ((to * 12, READ * 12),)

    def test_every_example_is_used_exactly_once_in_the_order_of_one_host(self, run):
        (event,) = run.events("rolled_back")
        to = event["to_step"]
        others = run.one_host(28 + READ - to)
        del others[to:READ]
        assert [each.digest for each in run.records] == [each.digest for each in others]

    def test_losses_are_those_of_one_host_that_was_never_disturbed(self, run):
        (event,) = run.events("rolled_back")
        to = event["to_step"]
        np.testing.assert_allclose(
            [record.loss for record in run.records[:to]],
            [record.loss for record in run.one_host(to)],
            rtol=claims.LOSS_RTOL,
        )
