"""A live run changes its slices as planned, replaces them, and refuses bad ones."""

import signal

import pytest

from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import test_elastic_run, test_stopped_run


@pytest.fixture
def ram():
    with shared_memory.directory("changes") as directory:
        yield directory


@pytest.mark.night
def test_a_spare_replaces_a_preempted_slice_and_no_step_is_lost(tmp_path, corpus, ram):
    config = test_elastic_run.configured(
        tmp_path,
        corpus,
        ram,
        elastic_max_slice_count=3,
        # Its host alone has the data state.
        faults=[{"preempt_slice": 0, "at_step": 12}],
        **test_elastic_run.anew(tmp_path),
    )
    run = test_elastic_run.trained_until(config, "world 2 starts")
    # The spare has the mesh and the program of the slice that it replaces.
    assert test_elastic_run.worlds(run) == [[0, 1, 2], [1, 2, 3]]
    assert [each["spares"] for each in runs.events(run, "world_started")] == [[3], []]
    names = test_elastic_run.names(run)
    assert (names.count("compiled"), names.count("executable_loaded")) == (1, 1)
    assert [each["slice"] for each in runs.events(run, "slice_preempted")] == [0]
    assert "slice_lost" not in names
    # Though the memory of the slice went with it.
    (left,) = runs.events(run, "world_left")
    assert step_log.read(run)[1].start_step == left["step"]
    (recovered,) = runs.events(run, "recovered")
    assert recovered["steps_lost"] == 0
    assert "PASSED" in runs.verb("audit", run)


@pytest.mark.slow
def test_a_slice_that_computes_wrong_values_is_refused_and_quarantined(
    tmp_path, corpus, ram
):
    config = test_elastic_run.configured(
        tmp_path,
        corpus,
        ram,
        hosts=2,
        slices=2,
        multi_tier_checkpointing_backup_interval_steps=1000,
        elastic_min_slice_count=1,
        elastic_quarantine_failures=2,
        faults=[
            {"break_slice": 1, "at_step": 12},
            {"kill_slice": 1, "at_step": 12},
            {"return_slice": 1, "at_step": 20},
        ],
    )
    run = test_elastic_run.trained_until(config, "is not used again")
    assert test_elastic_run.worlds(run) == [[0, 1], [0]]
    # It is checked again later.
    refused = runs.events(run, "slice_refused")[0]
    assert refused["slice"] == 1
    assert "device 0 of its host 0 computed" in refused["why"]
    (quarantined,) = runs.events(run, "slice_quarantined")
    assert quarantined["slice"] == 1
    assert quarantined["why"] == "it has failed 2 times in this run"


@pytest.mark.slow
def test_a_live_run_is_scaled_then_stopped_and_continues_on_all_slices(
    tmp_path, corpus, ram
):
    config = test_elastic_run.configured(
        tmp_path,
        corpus,
        ram,
        hosts=2,
        slices=2,
        elastic_min_slice_count=1,
        # The output is not read while the verb waits, and a full pipe blocks the run.
        log_period=200,
    )
    run, at = tmp_path / "tiny", "step "
    with test_stopped_run.start(config) as started:
        output = ""
        for line in started.stdout:
            output += line
            if line.startswith(at):
                refused = runs.cli("scale", run, "--slices", 3)
                assert (refused.returncode, refused.stdout) == (1, "")
                assert "the run trains on 1 to 2 slices" in refused.stderr
                scaled = runs.cli("scale", run, "--slices", 1)
                assert scaled.returncode == 0, scaled.stderr
                started.terminate()
                at = "never again"
    # The verb shows the change.
    assert "world 2 starts on slices 0, spare: 1" in scaled.stdout
    assert "0 steps to train again" in scaled.stdout
    assert scaled.stdout.endswith("the run is on slices 0\n")
    (requested,) = runs.events(run, "scale_requested")
    assert (requested["slices"], requested["chosen"]) == (1, [0])
    # SIGTERM ends it, with its last step saved.
    assert started.returncode == 128 + signal.SIGTERM, output
    (stopped,) = runs.events(run, "run_stopped")
    assert stopped["saved"] is True
    # The request does not outlast the start.
    test_elastic_run.trained(config, f"steps={stopped['step'] + 20}")
    assert test_elastic_run.worlds(run) == [[0, 1], [0], [0, 1]]
    starts = [attempt.start_step for attempt in step_log.read(run)]
    (left,) = runs.events(run, "world_left")
    assert starts == [0, left["step"], stopped["step"]]
    assert "PASSED" in runs.verb("audit", run)
