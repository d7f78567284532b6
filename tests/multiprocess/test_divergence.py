"""Runs that diverge at a planted point, go back, and go on without its data."""

import json

import numpy as np
import pytest

from elastic_ckpt.training import step_log
from tests import corpora, runs

ROWS = 12
# Float32 sums over another number of devices, in another order.
LOSS_RTOL = 1e-5
# In the noise they go back to the newest step that is saved before it.
SETTINGS = {
    "enable_data_shuffling": False,
    "global_batch_size": ROWS,
    "learning_rate": 0.02,
    "warmup_steps_fraction": 0,
    "divergence_action": "rollback",
    "divergence_loss_margin": 0.5,
    "divergence_loss_smoothing": 0.3,
    "divergence_patience_steps": 3,
    "divergence_warmup_steps": 4,
}


def written(path, noisy):
    """A corpus, in order, of which some batches are noise."""
    noise = np.random.default_rng(0).integers(128, 256, (ROWS * 40, 32), np.uint8)
    texts = [
        noise[number].tobytes()
        if number // ROWS in noisy
        else b"text %d " % (number % (ROWS * 40)) * 5
        for number in range(ROWS * 1000)
    ]
    return corpora.write_records(path, texts, options="group_size:1")


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """A corpus whose batches 12 to 14 are noise."""
    path = tmp_path_factory.mktemp("spoilt") / "texts.array_record"
    return written(path, range(12, 15))


def configured(directory, corpus, **settings):
    directory.mkdir()
    return runs.write_config(directory, corpus, **{**SETTINGS, **settings})


def trained(config, *settings, code=0):
    ended = runs.cli("train", config, *settings)
    output = ended.stdout + ended.stderr
    assert ended.returncode == code, output
    return output


def check_went_back(run, to=8):
    """The run went back once from the noise to a step, and continued after it."""
    (event,) = runs.events(run, "rolled_back")
    assert (event["to_step"], event["rollbacks"]) == (to, 1)
    # All that was read since then, with the batch after the third bad one.
    assert event["rows"] == (16 - to) * ROWS
    check_rows(run, to)


def check_rows(run, to):
    """The run trained on all rows in order, without those from a step to the noise."""
    ids = [record.ids for record in runs.steps(run)]
    numbers = [*range(to * ROWS), *range(16 * ROWS, (len(ids) + 16 - to) * ROWS)]
    assert [number for row in ids for number in row] == numbers
    assert step_log.read(run)[-1].left_out == ((to * ROWS, 16 * ROWS),)
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"], outcome
    assert outcome["num_left_out"] == (16 - to) * ROWS


def check_same(run, other, *, rtol=LOSS_RTOL):
    """Two runs had the same batches, and nearly the same losses."""
    steps, others = runs.steps(run), runs.steps(other)
    assert [step.digest for step in steps] == [step.digest for step in others]
    np.testing.assert_allclose(
        [step.loss for step in steps], [step.loss for step in others], rtol=rtol
    )


@pytest.mark.slow
def test_a_run_that_diverges_goes_back_and_on_without_the_bad_data(tmp_path, spoilt):
    config = configured(tmp_path / "one_host", spoilt, steps=22)
    trained(config)
    run = config.parent / "tiny"
    check_went_back(run)
    (event,) = runs.events(run, "divergence_found")
    assert (event["step"], event["callback"]) == (15, "loss_above_best")
    assert event["why"].endswith("since step 13")
    # The step that it went back to has the new data state; later ones are gone.
    assert runs.saved_steps(run) == [4, 8, 12, 16, 20, 22]
    data = json.loads((run / "checkpoints/12/data/data_state.json").read_text())
    assert data["left_out"] == [[8 * ROWS, 16 * ROWS]]


@pytest.mark.slow
def test_hosts_that_change_on_the_way_go_back_to_the_same_step_twice(tmp_path):
    corpus = written(tmp_path / "texts.array_record", [*range(12, 15), *range(17, 20)])
    config = configured(tmp_path / "twice", corpus)
    # The second noise begins with step 10 after the first one is left out. The first
    # hosts leave after the second of three bad steps; the next go back to their step.
    for hosts, steps in ((4, 14), (2, 20), (3, 22)):
        trained(config, f"hosts={hosts}", f"steps={steps}")
    run = config.parent / "tiny"
    events = runs.events(run, "rolled_back")
    assert [(each["to_step"], each["rollbacks"]) for each in events] == [(8, 1), (8, 2)]
    ids = [number for record in runs.steps(run) for number in record.ids]
    assert ids == [*range(8 * ROWS), *range(21 * ROWS, (22 + 13) * ROWS)]
    assert [attempt.hosts for attempt in step_log.read(run)] == [4, 2, 2, 2, 3]
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"], outcome
    assert outcome["num_left_out"] == 13 * ROWS


@pytest.mark.slow
@pytest.mark.parametrize(("action", "saved"), [("stop", [4, 8]), ("abort", [4, 8, 12])])
def test_a_run_that_diverges_ends_with_its_last_good_step_or_as_it_is(
    tmp_path, spoilt, action, saved
):
    config = configured(tmp_path / action, spoilt, steps=22, divergence_action=action)
    output = trained(config, code=1)
    assert "the run was ended after step 16, which is not saved: loss_above" in output
    assert f"; the newest step is {saved[-1]}" in output
    assert runs.saved_steps(config.parent / "tiny") == saved
    (failed,) = runs.events(config.parent / "tiny", "run_failed")
    assert "the smoothed loss is" in failed["why"]


@pytest.mark.slow
def test_a_run_that_may_not_go_back_any_more_ends(tmp_path, spoilt):
    config = configured(tmp_path / "no", spoilt, steps=22, divergence_max_rollbacks=0)
    output = trained(config, code=1)
    assert "not saved: loss_above_best" in output
    assert "the run has gone back 0 times (divergence_max_rollbacks=0)" in output


@pytest.mark.parametrize(
    ("noisy", "period", "to"),
    [
        # Right after the first save, and before any.
        (range(8, 11), 8, 8),
        (range(7, 10), 100, 0),
    ],
)
@pytest.mark.slow
def test_a_run_that_diverges_at_its_first_save_goes_on_without_the_data(
    tmp_path, noisy, period, to
):
    corpus = written(tmp_path / "texts.array_record", noisy)
    config = configured(
        tmp_path / "first",
        corpus,
        divergence_patience_steps=2,
        checkpoint_period=period,
    )
    # The second start continues from wherever the first one went back to.
    for steps in (10, 16):
        trained(config, f"steps={steps}")
    run = config.parent / "tiny"
    (event,) = runs.events(run, "rolled_back")
    assert event["to_step"] == to
    ids = [number for record in runs.steps(run) for number in record.ids]
    read = to + event["rows"] // ROWS
    assert read > max(noisy) - 1
    expected = [*range(to * ROWS), *range(read * ROWS, (read + 16 - to) * ROWS)]
    assert ids == expected
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"], outcome
    assert outcome["num_left_out"] == event["rows"]
