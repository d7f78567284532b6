"""A live run in a bucket loses a slice, takes it in again, and goes on elsewhere."""

import shutil

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.training import step_log
from tests import runs, shared_memory
from tests.multiprocess import test_elastic_run


@pytest.mark.slow
def test_a_run_in_a_bucket_outlives_a_slice_and_then_the_memory_of_all(
    bucket, tmp_path, corpus
):
    with shared_memory.directory("elastic") as ram:
        config = test_elastic_run.configured(
            *(tmp_path, corpus, ram),
            hosts=2,
            slices=2,
            elastic_min_slice_count=1,
            elastic_compile_ahead_seconds=0,
            base_output_directory=bucket,
            faults=[
                {"kill_slice": 1, "at_step": 12},
                {"return_slice": 1, "at_step": 20},
            ],
        )
        test_elastic_run.trained_until(config, "world 3 starts")
        run = storage.absolute(bucket) / "tiny"
        assert test_elastic_run.worlds(run) == [[0, 1], [0], [0, 1]]
        (lost,) = runs.events(run, "slice_lost")
        assert lost["slice"] == 1
        # Nothing was lost, and nothing was read from the bucket.
        restored = runs.events(run, "restored_from")
        assert {each["persistent_bytes"] for each in restored} == {0}
        starts = [attempt.start_step for attempt in step_log.read(run)]
        assert starts[0] == 0
        assert all(starts[1:])
        (stopped,) = runs.events(run, "run_stopped")
        shutil.rmtree(ram)
        steps = stopped["step"] + 4
        settings = ("hosts=1", "slices=1", f"steps={steps}", "faults=[]")
        ended = runs.cli("train", config, *settings)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "from persistent storage" in ended.stdout
        names = {each.name for each in run.iterdir()}
        assert {"checkpoints", "config.json", "events.jsonl", "step_log"} <= names
        assert "PASSED" in runs.verb("audit", run)
        assert "PASSED" in runs.verb("verify", run)
