import collections

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import order, records, sharded_data
from elastic_ckpt.data.lm import rows
from elastic_ckpt.data.sources import parquet
from tests import corpora, worlds
from tests.source_contract import read, resumed_everywhere

# More blocks than shards, and holes between them; and fewer.
FILES = st.one_of(
    st.just(((1, 2, 3) * 30, (), (4, 0))),
    st.lists(
        st.lists(st.integers(0, 9), max_size=5).map(tuple), min_size=1, max_size=5
    ).map(tuple),
).filter(lambda blocks: any(map(any, blocks)))


@settings(max_examples=60)
# Those that read one record more are only some of a group, after the last shard.
@hypothesis.example(
    blocks=((39,), (11,), (37, 18)),
    seed=None,
    num_shards=12,
    chained=True,
    small_records=0,
    num_epochs=3,
    lead=1,
)
@given(
    blocks=FILES,
    seed=st.sampled_from([None, 0, -1]),
    num_shards=st.integers(1, 40),
    chained=st.booleans(),
    small_records=st.sampled_from([0, 2**20]),
    num_epochs=st.integers(1, 4),
    lead=st.integers(0, 39),
)
def test_shards_read_each_record_once_an_epoch_and_as_many_in_all_but_for_one(
    blocks, seed, num_shards, chained, small_records, num_epochs, lead
):
    dataset = corpora.Numbers(blocks=blocks, chained=chained)
    reading = {"shuffle_seed": seed, "num_epochs": num_epochs}
    found, counts = {}, collections.Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_SMALL_RECORDS", small_records)
        records._order.cache_clear()
        for shard in range(num_shards):
            of_shard = read(dataset, shard, num_shards, **reading)
            of_shard.lead = lead % num_shards
            elements = iter(of_shard)
            for element in elements:
                # It has read this one, too.
                epoch, taken = records.place_in(elements.get_state())
                place = shard, epoch, taken - 1
                assert element["record"] not in found
                found[element["record"]] = place, element["number"]
                counts[shard] += 1
    total = num_epochs * sum(map(sum, blocks))
    assert sorted(found) == list(range(total))
    # The rows of finite data have no gap before their end.
    least, rest = divmod(total, num_shards)
    for shard in range(num_shards):
        assert counts[shard] == least + ((shard - lead) % num_shards < rest)
    if num_shards == 1 and seed is None:
        assert list(found) == sorted(found)
    first = 0
    for file, counts in enumerate(dataset.blocks):
        for in_file in range(sum(counts)):
            occurrences = list(records.occurrences(of_shard, file, in_file))
            assert [each.epoch for each in occurrences] == [*range(num_epochs)]
            for occurrence in occurrences:
                place = occurrence.shard, occurrence.epoch, occurrence.taken
                assert found[occurrence.number] == (place, first + in_file)
                assert records.origin(of_shard, occurrence.number) == (
                    dataset.files[file],
                    in_file,
                    occurrence.epoch,
                )
        first += sum(counts)


@pytest.mark.parametrize(("num_kept", "window"), [(4, 0), (0, 0), (3000, 7000)])
def test_a_row_may_need_one_record_of_an_epoch_or_many_epochs_but_not_none(
    monkeypatch, num_kept, window
):
    monkeypatch.setattr(records, "_LEAST_FRUITLESS", 100)
    dataset = corpora.Numbers(blocks=((10,) * 300,))

    def make_shard(shard):
        found = read(dataset, shard, 4, shuffle_seed=1)
        kept = found.filter(lambda element: (element["number"] - 68) % 3000 < num_kept)
        if window:
            documents = kept.map(lambda element: np.arange(3) + element["number"])
            return rows.Rows(documents, length=8, window=window, shard=shard)
        return kept.map(lambda element: {"number": np.array(element["number"])})

    data = sharded_data.sharded(make_shard, num_shards=4, pipeline="filters")
    world = worlds.World(data, 1, 4)
    if window:
        assert world.batch()["inputs"].shape == (4, 8)
        return
    if num_kept:
        for _ in range(10):
            assert set(world.batch()["number"]) <= {68, 69, 70, 71}
        return
    message = (
        r"data files from .*numbers-0 on: logical shard \d read 6,00\d consecutive"
        " records, 8 epochs of its share, without producing a row; check whether a fil"
    )
    with pytest.raises(errors.DataError, match=message):
        world.batch()


def test_a_column_that_has_the_name_of_the_record_number_is_refused(tmp_path):
    table = pa.table({"record": [1, 2], "text": ["a", "b"]})
    file = corpora.write_table(tmp_path / "a.parquet", table, group_rows=2)
    with pytest.raises(errors.DataError, match="the column 'record' clashes"):
        next(iter(read(parquet.Parquet(files=(file,)), 0, 1)))
    dataset = parquet.Parquet(files=(file,), columns=("text",))
    assert next(iter(read(dataset, 0, 1))) == {"text": "a", "record": 0}


def test_grain_s_random_map_draws_the_same_after_a_resume(tmp_path):
    file = corpora.write_parquet(tmp_path / "a", corpora.documents(0, 30))
    of_shard = read(parquet.Parquet(files=(file,)), 1, 3, shuffle_seed=7, num_epochs=2)
    drawn = of_shard.seed(1).random_map(
        lambda _, generator: {"number": generator.integers(2**62)}
    )
    elements, _ = resumed_everywhere(drawn)
    assert len({element["number"] for element in elements}) == len(elements) == 20
