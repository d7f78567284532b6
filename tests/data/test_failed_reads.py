"""After a failure, who asks again gets the rows of a run without it."""

import concurrent.futures
import itertools
import os
import time

import fsspec
import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt import data
from elastic_ckpt.core import errors, working_directory
from elastic_ckpt.data import example_id, local_batches, rows, shard_rows
from elastic_ckpt.data.sources import columns, files, parquet, remote_file, source

_GROUPS = 9


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_PAUSES_SECS", ())
    sizes = np.random.default_rng(0).integers(5, 40, (2, 20 * _GROUPS))
    for name, first, of_file in zip("ab", (1, 1001), sizes.tolist(), strict=True):
        tokens = [[first + n] * size for n, size in enumerate(of_file)]
        table = pa.table({"tokens": tokens})
        pq.write_table(table, f"{name}.parquet", row_group_size=20)


def configured(paths, **keys):
    return data.from_config(
        grain_train_files=paths,
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
        num_logical_shards=1,
        packing=True,
        **keys,
    )


def of_stages():
    """The second stage begins with documents of the first and of both files."""
    first = configured("b.parquet", max_target_length=64, num_epoch=0)
    both = "a.parquet,3;b.parquet,1"
    second = configured(both, max_target_length=128, num_epoch=0)
    stages = [data.Stage(begin=0, data=first), data.Stage(begin=5, data=second)]
    return data.staged(stages)


def of_mixture():
    """One of the datasets ends in the middle of a chapter."""
    both = "a.parquet,1;b.parquet,1"
    return configured(both, max_target_length=64, num_epoch=1)


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("make", [of_stages, of_mixture])
def test_a_read_that_fails_changes_no_row(monkeypatch, make):
    decode, failing = parquet.Parquet.decode, []

    def decoded(self, file, block):
        if (self.files[file][-9:], block) in failing:
            failing.clear()
            raise OSError(5, "the store is busy")
        return decode(self, file, block)

    monkeypatch.setattr(parquet.Parquet, "decode", decoded)

    def inputs():
        files.forget_all()
        batches, made = local_batches.LocalBatches(make(), global_batch_size=4), []
        failures = []
        while len(made) < 40 and len(failures) < 2:
            try:
                made.append(next(batches)["inputs"].ravel())
            except errors.DataError as error:
                failures.append(error)
            except StopIteration:
                break
        assert all("the store is busy" in str(error) for error in failures)
        return np.concatenate(made)

    expected = inputs()
    for place in itertools.product(("a.parquet", "b.parquet"), range(_GROUPS)):
        failing.append(place)
        assert np.array_equal(inputs(), expected)
        assert not failing


def in_shards():
    numbers = grain.MapDataset.range(1000).map(lambda number: {"x": np.int64(number)})
    return data.sharded(
        lambda shard: numbers[shard::2].to_iter_dataset(), num_shards=2, pipeline="x"
    )


def by_position():
    numbers = grain.MapDataset.range(1000).map(lambda number: {"x": np.int64(number)})
    return data.positional(numbers, pipeline="x")


@pytest.mark.parametrize("make", [in_shards, by_position])
@pytest.mark.parametrize(
    ("module", "name"), [(rows, "batch_ids"), (shard_rows, "with_ids")]
)
def test_an_interruption_anywhere_in_a_batch_loses_none(
    monkeypatch, make, module, name
):
    function, calls = getattr(module, name), itertools.count()

    def interrupted(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(module, name, interrupted)
    batches, numbers = local_batches.LocalBatches(make(), global_batch_size=2), []
    while len(numbers) < 10:
        try:
            batch = next(batches)
        except KeyboardInterrupt:
            continue
        assert example_id.join(batch["example_id"]) == batch["x"].tolist()
        numbers += batch["x"].tolist()
    assert numbers == list(range(10))


def test_a_closed_iterator_yields_no_batch():
    batches = local_batches.LocalBatches(in_shards(), global_batch_size=2)
    next(batches)
    batches.close()
    with pytest.raises(errors.DataError, match="this iterator was closed"):
        next(batches)


def test_too_little_memory_is_no_damage():
    with pytest.raises(MemoryError), columns.damaged(errors.DataError):
        raise pa.lib.ArrowMemoryError("malloc of size 1073741824 failed")


def test_each_error_of_a_lost_block_has_notes_of_its_own():
    block = source.LostBlock(source.CorruptError("spoilt"))
    for shard in range(2):
        with pytest.raises(source.CorruptError, match="spoilt") as raised:
            block.elements([0])
        raised.value.add_note(f"in the pipeline of logical shard {shard}")
        assert len(raised.value.__notes__) == 1


def test_files_that_are_copied_at_the_same_time_are_all_there(monkeypatch):
    new_path = working_directory.new_path

    def slow():
        time.sleep(0.01)
        return new_path()

    monkeypatch.setattr(working_directory, "new_path", slow)
    remote_file._directory.cache_clear()
    urls = [f"memory://copies/{number}.arrow" for number in range(16)]
    for url in urls:
        with fsspec.open(url, "wb") as stream:
            stream.write(url.encode())
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        copies = list(pool.map(files.local_copy, urls))
    assert all(map(os.path.exists, copies))
