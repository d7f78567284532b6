"""Runs whose rows change their length, and not their number, at a stage of the data."""

import json

import jax
import numpy as np
import pytest

from tests.training import test_distrust

LENGTHS = {0: 8, 3: 16, 5: 8, 7: 24}
STAGES = [{"begin_step": at, "max_target_length": n} for at, n in LENGTHS.items()]


def train(directory, corpus, steps):
    stages = json.dumps(STAGES)
    return test_distrust.train(
        directory, corpus, steps, data_stages=stages, num_logical_shards=8
    )


def compiled(recorded):
    """The steps for which a program was compiled."""
    return [each["step"] for each in recorded.named("compiled")]


@pytest.mark.slow
def test_rows_of_another_length_train_on_over_starts_and_rollbacks(
    tmp_path, corpus, monkeypatch
):
    one, other = tmp_path / "one", tmp_path / "other"
    undisturbed, _, recorded = train(other, corpus, 10)
    # A program for each length: the first one serves the third stage, too.
    assert compiled(recorded) == [1, 4, 8]
    test_distrust.poison(monkeypatch, 6)
    # The first start ends within the second stage, and the second one with a bad copy.
    train(one, corpus, 4)
    train(one, corpus, 6)
    # It goes back from step 7 to step 4: over the begin of the third stage.
    ended, _, recorded = train(one, corpus, 10)
    assert recorded.named("restore_distrusted")
    assert compiled(recorded) == [7, 5, 8]
    jax.tree.map(np.testing.assert_array_equal, ended.state, undisturbed.state)
    assert test_distrust.logged(one) == test_distrust.logged(other)
