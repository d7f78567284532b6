"""A read that fails changes no row: who asks again gets those of a run without it."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt import data
from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches
from elastic_ckpt.data.sources import files, parquet

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
