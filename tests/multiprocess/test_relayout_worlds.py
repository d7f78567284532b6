"""Hosts of one world load a checkpoint of another layout, each what it needs."""

import itertools

import pytest
from jax.sharding import PartitionSpec

from tests.multiprocess import relayout_worlds

NORM_BYTES = 4 * relayout_worlds.EMBED
MATRICES_BYTES = 4 * (
    relayout_worlds.LAYERS * relayout_worlds.OUT * relayout_worlds.EMBED
)


@pytest.mark.slow(minutes=0.3)
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_each_host_reads_its_part_alone_and_once(tmp_path, num_hosts):
    relayout_worlds.write(tmp_path)
    reads = relayout_worlds.run(
        tmp_path,
        num_hosts=num_hosts,
        spec=PartitionSpec(None, None, ("slice", "fsdp")),
        logs=tmp_path / "logs",
    )
    for ranges in reads:
        assert sum(stop - start for start, stop in ranges) == (
            MATRICES_BYTES // num_hosts + NORM_BYTES
        )
        assert len(ranges) <= relayout_worlds.LAYERS + 1
    covered = sorted((start, stop) for ranges in reads for start, stop in ranges)
    # The vector, which all hosts hold, is the last in the file.
    parts = [each for each in covered if each[1] != covered[-1][1]]
    overlaps = [
        (first, second)
        for first, second in itertools.pairwise(parts)
        if first[1] > second[0]
    ]
    assert not overlaps
