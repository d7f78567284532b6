"""The same bytes on any hosts, for every format and pipeline, also from state to state.

The oracle is one host that is never stopped.
"""

import collections
import dataclasses
import gc
import itertools
import json
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data import example_id, shard_rows
from tests import formats, stages, worlds

# Every pipeline, and every format; the property below draws the others.
CASES = [
    (file_format, name)
    for name, file_format in zip(
        [name for name in formats.PIPELINES if not name.endswith("_singly")],
        itertools.cycle(formats.FORMATS),
        strict=False,
    )
]
each_pipeline = pytest.mark.parametrize(("file_format", "name"), CASES)


def test_every_format_has_a_case():
    assert {file_format for file_format, _ in CASES} == {*formats.FORMATS}


@pytest.mark.parametrize("name", ["plain", "everything", "window_shuffle_singly"])
def test_one_host_takes_the_rows_that_each_shard_yields_in_turn(files, name):
    data = formats.data(files["tfrecord"], name)
    shards = [iter(data.make_shard(shard)) for shard in range(data.num_shards)]
    saved, counts = None, collections.Counter()
    for size in (12, 8, 36, 4, 10, 24):
        one = worlds.World(data, 1, size)
        if saved:
            one.load(saved)
        batch = one.batch()
        for row, number in enumerate(example_id.join(batch.pop("example_id"))):
            index, shard = divmod(number, 12)
            assert index == counts[shard]
            counts[shard] += 1
            values = {feature: value[row] for feature, value in batch.items()}
            assert worlds.content(values) == worlds.content(next(shards[shard]))
        saved = one.save()


@each_pipeline
def test_a_shard_resumes_from_the_state_before_every_element(files, file_format, name):
    # As Grain's own contract test, but through JSON; and a mixture's state may get more
    # fields as its datasets are opened.
    data = formats.data(files[file_format], name, num_epochs=2)
    pipeline = data.make_shard(7)
    iterator_, states, expected = iter(pipeline), [], []
    states.append(json.dumps(shard_rows.to_json(iterator_.get_state())))
    for row in iterator_:
        expected.append(worlds.content(row))
        states.append(json.dumps(shard_rows.to_json(iterator_.get_state())))
    assert len(expected) > 5
    for number, state in enumerate(states):
        resumed = iter(pipeline)
        resumed.set_state(shard_rows.from_json(json.loads(state)))
        assert json.dumps(shard_rows.to_json(resumed.get_state())) == state
        # To the end from some; the rows after a state show whether it is right.
        end = None if number % 8 == 0 else number + 6
        rows = itertools.islice(resumed, end and 6)
        assert list(map(worlds.content, rows)) == expected[number:end]


@given(
    file_format=st.sampled_from(formats.FORMATS),
    name=st.sampled_from(list(formats.PIPELINES)),
    num_epochs=st.sampled_from([None, None, 1, 2]),
    run=st.lists(stages.stages(), min_size=2, max_size=6),
)
def test_any_run_has_the_bytes_of_one_host(
    files, tmp_path_factory, file_format, name, num_epochs, run
):
    data = formats.data(files[file_format], name, num_epochs=num_epochs)
    stages.check([data] * len(run), run, tmp_path_factory.mktemp)


@pytest.mark.slow
@settings(max_examples=4, phases=[hypothesis.Phase.generate])
@given(
    file_format=st.sampled_from(formats.FORMATS),
    name=st.sampled_from(list(formats.PIPELINES)),
    num_epochs=st.sampled_from([None, 1]),
    run=st.lists(
        # Simple examples come first, and these have workers too.
        stages.stages(max_hosts=2, num_workers=(1, 0, 2)),
        min_size=2,
        max_size=3,
    ).filter(lambda run: any(stage.num_workers and stage.num_batches for stage in run)),
)
def test_any_run_with_worker_processes_has_the_bytes_of_one_host(
    files, tmp_path_factory, file_format, name, num_epochs, run
):
    data = formats.data(files[file_format], name, num_epochs=num_epochs)
    stages.check([data] * len(run), run, tmp_path_factory.mktemp)


def targets(batches):
    """Every target of real tokens, in order."""
    return np.concatenate(
        [b["targets"][b["targets_segmentation"] > 0] for b in batches]
    ).tolist()


def expected_targets(steps):
    """Every target that the documents have."""
    targets = []
    for document in formats.documents(*steps.datasets):
        if not steps.filtered or formats.is_kept({"tokens": document}):
            end = formats.LENGTH + 1 if steps.truncate else None
            targets += document[1:end].tolist()
    return sorted(targets)


@each_pipeline
def test_each_epoch_has_every_token_once_and_ends_at_the_same_step_on_any_hosts(
    files, file_format, name
):
    num_epochs = 2 if file_format in ("arrow", "parquet") else 1
    data = formats.data(files[file_format], name, num_epochs=num_epochs)
    one = worlds.World(data, 1, 24).rest()
    assert sorted(targets(one)) == sorted(
        num_epochs * expected_targets(formats.PIPELINES[name])
    )
    expected = list(map(worlds.content, one))
    for batch in one:
        padding = batch.pop("example_id")[~batch["mask"]]
        assert set(example_id.join(padding)) <= {example_id.NONE}
        assert not any(feature[~batch["mask"]].any() for feature in batch.values())
    for num_hosts in (3, 8):
        batches = worlds.World(data, num_hosts, 24).rest()
        assert list(map(worlds.content, batches)) == expected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing:
    """The shards of another, of which one has rows that cannot be made."""

    make_inner: formats.MakeShard
    shard: int

    def __call__(self, shard):
        return (
            self.make_inner(shard).map(self.check)
            if shard == self.shard
            else self.make_inner(shard)
        )

    def check(self, row):
        first = row["targets"][0]
        if first % 3 == 0:
            raise ValueError(f"token {first} is divided by 3")
        return row


def batches_before_an_error(world):
    batches = []
    try:
        while len(batches) < 50:
            batches.append(world.next())
    except ValueError as error:
        return batches, str(error), error.__notes__
    return batches, "", []


@pytest.mark.parametrize(
    ("num_workers", "read_ahead"),
    [(0, 0), (0, 2), pytest.param(1, 1, marks=pytest.mark.slow)],
)
def test_the_error_of_a_pipeline_reaches_the_caller_whoever_reads(
    files, num_workers, read_ahead
):
    good = formats.data(files["parquet"], "plain")
    data = dataclasses.replace(
        good,
        make_shard=Failing(make_inner=good.make_shard, shard=7),
        num_workers=num_workers,
    )
    world = worlds.World(data, 1, 12, read_ahead=read_ahead)
    batches, message, notes = batches_before_an_error(world)
    assert re.fullmatch(r"token \d+ is divided by 3", message)
    one = worlds.World(good, 1, 12)
    assert len(batches) > 0
    assert batches == [one.next() for _ in batches]
    assert "in the pipeline of logical shard 7" in notes
    with pytest.raises(ValueError, match=re.escape(message)):
        world.next()
    # What was read of the batch did not change the state.
    later = worlds.World(good, 1, 12)
    later.load(world.save())
    assert later.next() == one.next()
    world.close()
    # The error holds what failed, and with it its processes.
    del world
    gc.collect()
