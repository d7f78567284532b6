"""`kill -9` of one host in the midst of a save; the supervisor ends the others."""

import pytest

from elastic_ckpt.data import cursors, state
from tests import corpora, runs
from tests.faults import test_killed_run

NUM_SHARDS = 12


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The settings of a run whose hosts all have cursors to write."""
    file = tmp_path_factory.mktemp("texts") / "texts.parquet"
    texts = [f"text {n} ".encode() * (1 + n % 7) for n in range(120)]
    corpora.write_parquet(file, [{"text": text} for text in texts])
    return {
        "corpus": str(file),
        "grain_train_files": str(file),
        "grain_file_type": "parquet",
        "num_logical_shards": NUM_SHARDS,
        "global_batch_size": NUM_SHARDS,
        "packing": True,
        "use_truncation": False,
    }


# Point, its occurrence in the second save, who is killed, of how many hosts, whether in
# colocated Python, and the steps that are complete then.
CASES = [
    ("before_the_state_is_taken", 2, 1, 2, True, [4]),
    ("after_the_state_is_taken", 2, 0, 2, False, [4]),
    ("before_the_state_is_written", 2, 1, 2, False, [4]),
    ("with_the_cursors_half_written", 3, 1, 3, True, [4]),
    ("with_the_cursors_half_written", 3, 0, 3, False, [4]),
    ("after_the_state_is_written", 2, 1, 3, False, None),
    ("before_the_step_is_committed", 1, 0, 2, True, [4]),
    ("after_the_step_is_committed", 1, 0, 2, False, [4, 8]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "occurrence", "victim", "hosts", "colocated", "complete"), CASES
)
def test_a_run_of_which_one_host_is_killed_continues_from_a_step_with_both_its_parts(
    tmp_path, settings, point, occurrence, victim, hosts, colocated, complete
):
    config = runs.write_config(
        tmp_path, **settings, colocated_python_data_input=colocated
    )
    run = tmp_path / "tiny"
    test_killed_run.kill_at(point, occurrence, config, hosts, victim)
    saved = runs.saved_steps(run)
    # Whoever has written all may die before the others commit, or after that.
    assert saved in ([[4], [4, 8]] if complete is None else [complete])
    for step in saved:
        check_both_parts(run / "checkpoints" / str(step))
    output = test_killed_run.continue_and_audit(config, run, hosts=1)
    assert f"from step {saved[-1]} to step 12" in output
    assert runs.saved_steps(run) == [4, 8, 12]
    for step in (4, 8, 12):
        check_both_parts(run / "checkpoints" / str(step))


def check_both_parts(step):
    """Raises if the weights are not there, or the state of the data is not whole."""
    saved = state.read(step / "data")
    assert saved.position["stream_row"] == int(step.name) * NUM_SHARDS
    cursors.read(step / "data", range(NUM_SHARDS), saved.position)
    assert (step / "state" / "_METADATA").exists()
