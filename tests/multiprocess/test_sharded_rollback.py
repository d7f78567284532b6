"""A shuffled and packed mixture of Parquet files goes back, on other host counts."""

import json

import pytest

from elastic_ckpt.training import step_log
from tests import documents, runs
from tests.faults.test_killed_mixture import NUM_SHARDS, mixture  # noqa: F401
from tests.multiprocess import callbacks, test_divergence

# The step that it goes back to, and those that it has read by then.
TO, READ = 8, callbacks.PLANTED_STEP + 1


def configured(directory, mixture, **settings):  # noqa: F811
    corpus, values = mixture
    directory.mkdir()
    values = {**values, "enable_data_shuffling": True, "grain_shuffle_buffer_size": 8}
    return runs.write_config(directory, corpus, **{**values, **settings})


def trained_on(config, worlds):
    """The run that some hosts train to a step, in colocated Python or not."""
    for hosts, steps, colocated in worlds:
        test_divergence.trained(
            config,
            f"hosts={hosts}",
            f"steps={steps}",
            f"colocated_python_data_input={colocated}",
        )
    return config.parent / "tiny"


@pytest.mark.night
def test_a_packed_mixture_that_goes_back_continues_after_what_it_had_read(
    mixture,  # noqa: F811
    tmp_path,
):
    name = callbacks.named(callbacks.planted)
    config = configured(tmp_path / "back", mixture, training_callbacks=name)
    run = trained_on(config, ((4, 10, True), (3, 14, False), (6, 16, True)))
    assert [each.hosts for each in step_log.read(run)] == [4, 3, 3, 6]
    (event,) = runs.events(run, "rolled_back")
    assert (event["to_step"], event["rows"]) == (TO, (READ - TO) * NUM_SHARDS)
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"], outcome
    assert outcome["num_left_out"] == (READ - TO) * NUM_SHARDS
    # Steps that it went back over have another batch in each of two attempts.
    asked = range(TO - 2, READ + 2)
    assert documents.assert_named(run, asked, length=32) > len(asked)
    # One host that never goes back has the same batches, and those that are left out.
    calm = configured(tmp_path / "calm", mixture, steps=16 + READ - TO)
    test_divergence.trained(calm)
    digests = [step.digest for step in runs.steps(calm.parent / "tiny")]
    del digests[TO:READ]
    assert [step.digest for step in runs.steps(run)] == digests


@pytest.mark.night
def test_stages_begin_at_their_steps_again_after_a_rollback(
    mixture,  # noqa: F811
    tmp_path,
):
    name = callbacks.named(callbacks.planted)
    stages = [
        {"begin_step": 0},
        # In the middle of the steps that it goes back over; shards move there.
        {
            "begin_step": TO + 1,
            "max_target_length": 48,
            "global_batch_size": NUM_SHARDS // 2,
        },
        {"begin_step": READ + 2, "grain_packing_type": "best_fit"},
    ]
    config = configured(
        tmp_path / "back", mixture, training_callbacks=name, data_stages=stages
    )
    run = trained_on(config, ((3, 10, True), (3, 14, False), (2, 18, True)))
    (event,) = runs.events(run, "rolled_back")
    assert event["to_step"] == TO
    sizes = [step.num_rows for step in runs.steps(run)]
    small = NUM_SHARDS // 2
    assert sizes == [
        NUM_SHARDS if step <= TO or step >= READ + 2 else small for step in range(18)
    ]
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"], outcome
    assert outcome["num_left_out"] == NUM_SHARDS + (READ - TO - 1) * small
    assert outcome["stage_steps"] == [0, TO + 1, READ + 2]
    # The last stage has the length of the first.
    steps_of_length = {
        32: (*range(TO - 2, TO + 1), READ + 2, READ + 3),
        48: range(TO + 1, READ + 2),
    }
    for length, steps in steps_of_length.items():
        assert documents.assert_named(run, steps, length=length) > len(steps)
