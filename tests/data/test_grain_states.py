import functools
import json

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import cursors, grain_states, rows, sharded_data, state
from tests import pipelines

NUM_PROCESSES = 4


@pytest.mark.parametrize("pipeline", pipelines.ALL)
def test_processes_that_ran_grain_go_on_elastic_where_they_were(tmp_path, pipeline):
    make_shard = functools.partial(pipelines.ALL[pipeline], num_shards=NUM_PROCESSES)
    processes = [iter(make_shard(number)) for number in range(NUM_PROCESSES)]
    for process in processes:
        for _ in range(7):
            next(process)
    data = sharded_data.sharded(make_shard, num_shards=NUM_PROCESSES, pipeline=pipeline)
    grain_states.adopt(
        tmp_path, data, states=[p.get_state() for p in processes], num_rows=7
    )
    saved = state.read(tmp_path)
    assert saved.position == {"stream_row": 28}
    for host in range(2):
        batches = data.host_batches(
            rows.Placement.in_order(host, num_hosts=2, global_batch_size=4)
        )
        batches.go_to(
            saved.position,
            lambda shards: cursors.read(tmp_path, shards, {"stream_row": 28}),
        )
        for _ in range(5):
            expected = [next(p)["tokens"] for p in processes[2 * host : 2 * host + 2]]
            actual = next(batches)["tokens"]
            assert [row.tolist() for row in actual] == [e.tolist() for e in expected]


def test_each_shard_needs_a_state(tmp_path):
    data = sharded_data.sharded(
        functools.partial(pipelines.plain, num_shards=3),
        num_shards=3,
        pipeline="plain",
    )
    with pytest.raises(
        errors.DataError, match="2 Grain states were given for 3 logical shards"
    ):
        grain_states.adopt(tmp_path, data, states=[{}, {}], num_rows=1)
    assert not list(tmp_path.iterdir())
    assert json.dumps(data.identity())
