import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import records
from elastic_ckpt.data.sources import parquet, source
from tests import corpora
from tests.source_contract import assert_resumes_everywhere, in_turn, read, read_all

# Fewer records, blocks or files than shards; and more; and holes between them.
CORPORA = {
    "one record": ((1,),),
    "one block": ((30,),),
    "many files": ((2,), (1,), (0,), (3,)) * 6,
    "many blocks": ((1, 2, 3) * 30, (), (4, 0)),
    "blocks of all sizes": ((50, 1), (7,), (0, 20, 2)),
}


@pytest.fixture(params=CORPORA)
def dataset(request):
    return corpora.Numbers(blocks=CORPORA[request.param])


def mixed(**settings):
    return corpora.Numbers(blocks=CORPORA["blocks of all sizes"], **settings)


def record(element):
    return element["record"]


FILES = st.one_of(
    st.sampled_from(list(CORPORA.values())),
    st.lists(
        st.lists(st.integers(0, 9), max_size=5).map(tuple), min_size=1, max_size=5
    ).map(tuple),
).filter(lambda blocks: any(map(any, blocks)))


@settings(max_examples=25)
@given(
    blocks=FILES,
    seed=st.sampled_from([None, 0, 2**63]),
    num_shards=st.integers(1, 40),
    chained=st.booleans(),
)
def test_each_record_is_read_once_an_epoch_and_it_is_known_when(
    blocks, seed, num_shards, chained
):
    dataset = corpora.Numbers(blocks=blocks, chained=chained)
    options = records.ReadOptions(shuffle_seed=seed, num_epochs=2)
    found = {}
    for shard in range(num_shards):
        of_shard = records.Records(
            dataset, shard=shard, num_shards=num_shards, read_options=options
        )
        elements = iter(of_shard)
        # Afterwards it has read one more.
        for element in elements:
            epoch, taken = records.place_in(elements.get_state())
            assert record(element) not in found
            found[record(element)] = (shard, epoch, taken - 1), element["number"]
    size = sum(map(sum, blocks))
    assert sorted(found) == list(range(2 * size))
    first = 0
    for file, counts in enumerate(dataset.blocks):
        for in_file in range(sum(counts)):
            turns = list(records.turns(of_shard, file, in_file))
            assert [turn.epoch for turn in turns] == [0, 1]
            for turn in turns:
                place = turn.shard, turn.epoch, turn.taken
                assert found[turn.number] == (place, first + in_file)
                origin = records.origin(of_shard, turn.number)
                assert (origin.file, origin.record, origin.epoch) == (
                    dataset.files[file],
                    in_file,
                    turn.epoch,
                )
        first += sum(counts)


def test_files_without_a_record_are_an_error():
    with pytest.raises(errors.DataError, match="not one record"):
        read_all(corpora.Numbers(blocks=((0,), ())), 3)


def test_one_shard_reads_in_file_order(dataset):
    actual = read_all(dataset, 1, num_epochs=2)
    assert [e["number"] for e in actual] == 2 * list(range(source.num_records(dataset)))


def test_a_shard_that_has_ended_stays_at_its_end():
    elements = iter(read(mixed(), 0, 1, num_epochs=1))
    assert len(list(elements)) == source.num_records(mixed())
    saved = elements.get_state()
    assert list(elements) == []
    assert elements.get_state() == saved


@pytest.mark.parametrize(("num_shards", "seed"), [(1, 7), (3, None)])
def test_the_state_before_every_element_can_be_resumed_from(dataset, num_shards, seed):
    states, _ = assert_resumes_everywhere(
        lambda: read(dataset, 0, num_shards, shuffle_seed=seed, num_epochs=2)
    )
    assert max(map(len, states)) < 40


def test_a_corrupt_record_stops_the_shard_where_it_is():
    elements = iter(read(mixed(corrupt=frozenset([3])), 0, 1))
    assert [next(elements)["number"] for _ in range(3)] == [0, 1, 2]
    saved = elements.get_state()
    for _ in range(2):
        with pytest.raises(errors.DataError, match="3: corrupt"):
            next(elements)
        assert elements.get_state() == saved


@given(
    st.frozensets(st.integers(0, 79), max_size=20),
    st.integers(1, 20),
    st.booleans(),
)
def test_records_that_are_left_out_are_counted(corrupt, num_shards, lost):
    reading = {"num_epochs": 2, "skip_corrupt": True, "shuffle_seed": 7}
    dataset = mixed(corrupt=corrupt, lost=lost)
    iterators = [
        iter(read(dataset, n, num_shards, **reading)) for n in range(num_shards)
    ]
    actual = sorted(map(record, in_turn(iterators)))
    skipped = sum(i.get_state().get("skipped", 0) for i in iterators)
    assert len(set(actual)) == len(actual)
    assert len(actual) + skipped == 160
    if not lost:
        left = [r for r in range(160) if r % 80 not in corrupt]
        assert actual == left


def augmented():
    """The records of a shard, each with a random number of its own."""
    of_shard = read(mixed(), 1, 3, shuffle_seed=7, num_epochs=2).seed(1)
    return of_shard.random_map(
        lambda element, generator: element | {"drawn": generator.integers(2**62)}
    )


def test_grain_s_random_map_draws_the_same_after_a_resume():
    _, elements = assert_resumes_everywhere(augmented)
    assert len({element["drawn"] for element in elements}) == len(elements)


@pytest.fixture
def little_patience(monkeypatch):
    monkeypatch.setattr(records, "_LEAST_FRUITLESS", 1000)


@pytest.mark.usefixtures("little_patience")
def test_a_filter_that_rejects_everything_is_an_error(dataset):
    rejecting = read(dataset, 0, 3).filter(lambda _: False)
    with (
        pytest.raises(
            errors.DataError,
            match=r"numbers-0 and the \d+ files after it: 1,0\d\d records in a row,"
            " more than two epochs, made no row; check whether a filter",
        ),
        records.row_due(),
    ):
        next(iter(rejecting))


@pytest.mark.usefixtures("little_patience")
def test_two_epochs_are_read_however_many_they_are():
    dataset = corpora.Numbers(blocks=((10,) * 300,))
    late = read(dataset, 0, 1).filter(lambda e: e["record"] == 5999)
    with records.row_due():
        assert next(iter(late))["record"] == 5999
    never = read(dataset, 0, 1).filter(lambda e: e["record"] == 6000)
    with (
        pytest.raises(errors.DataError, match="6,010 records in a row"),
        records.row_due(),
    ):
        next(iter(never))


def test_a_column_that_has_the_name_of_the_record_number_is_refused(tmp_path):
    table = pa.table({"record": [1, 2], "text": ["a", "b"]})
    file = corpora.write_table(tmp_path / "a.parquet", table, group_rows=2)
    with pytest.raises(errors.DataError, match="its column 'record' has the name"):
        next(iter(read(parquet.Parquet(files=(file,)), 0, 1)))
    dataset = parquet.Parquet(files=(file,), columns=("text",))
    assert next(iter(read(dataset, 0, 1))) == {"text": "a", "record": 0}
