"""Data x tensor and data x pipeline parallelism: resumed with other degrees."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.elastic import supervisor
from tests.multiprocess import hybrid_worlds
from tests.multiprocess.hybrid_worlds import STEPS_A_WORLD, Degrees

# The worlds of a run: degrees, and hosts. Groups of tensor and pipeline parallelism
# cross hosts, or are within one.
TENSOR = [
    (Degrees(2, "model", 2), 4),
    (Degrees(4, "model", 1), 2),
    (Degrees(1, "model", 4), 4),
    (Degrees(1, "model", 2), 1),
]
PIPELINE = [
    (Degrees(2, "stage", 2), 4),
    (Degrees(2, "stage", 1), 2),
    (Degrees(1, "stage", 4), 4),
    (Degrees(4, "stage", 1), 1),
]
# Sums of matrix products are in another order under other degrees.
TOLERANCE = 2e-5


def run(worlds, directory, corpus):
    records = []

    def record(_, **fields):
        records.append(json.loads(fields["path"]))

    for degrees, num_hosts in worlds:
        program = functools.partial(
            hybrid_worlds.train,
            directory=str(directory / "steps"),
            corpus=corpus,
            degrees=degrees,
        )
        supervisor.HostProcesses(
            program,
            num_hosts=num_hosts,
            log_directory=hybrid_worlds.logs(directory, degrees),
            emit=record,
        ).run()
    assert len(records) == len(worlds)
    return records


@pytest.mark.slow(minutes=0.6)
@pytest.mark.parametrize("worlds", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_a_run_goes_on_bit_equal_under_other_degrees(worlds, tmp_path, corpus):
    records = run(worlds, tmp_path, corpus)
    for saved, restored in itertools.pairwise(records):
        assert saved["after"] == restored["before"]
    ids = [each for record in records for each in record["ids"]]
    assert ids == hybrid_worlds.expected_ids(corpus, len(worlds) * STEPS_A_WORLD)
    rng = ec.components.Rng(7)
    keys = [each for record in records for each in record["keys"]]
    assert keys == [jax.random.key_data(rng.next()).tolist() for _ in keys]
    rows = [record["rows"] * record["groups"] for record in records]
    steps = STEPS_A_WORLD * np.arange(1, len(worlds) + 1)
    assert rows == (hybrid_worlds.BATCH * steps).tolist()
    assert records[0]["groups"] == 2
    # Another path of the same computation: one device, from nothing.
    (alone,) = run([(Degrees(1, worlds[0][0].axis, 1), 1)], tmp_path / "one", corpus)
    assert alone["before"] == records[0]["before"]
    np.testing.assert_allclose(alone["losses"], records[0]["losses"], rtol=TOLERANCE)
