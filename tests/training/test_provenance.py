"""The documents that provenance names are those whose tokens the rows have.

The oracle is the one-host run itself: no token of `tests.formats` is in two documents,
so that the rows of a step say which documents they are made of.
"""

import collections
import contextlib
import dataclasses
import itertools

import grain
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import mixing, positional_data, records, sharded_data, stages
from elastic_ckpt.training import audit, step_log
from tests import conftest, corpora, formats
from tests.formats import of_stage
from tests.training.recorded_run import SIZES, Run, pieces_of

PIPELINES = ["plain", "filter", "window_shuffle", "first_fit", "mixture"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("formats")
    return {
        name: formats.write(directory, name)
        for name in ("arrayrecord", "jsonl", "parquet")
    }


@pytest.fixture(scope="module")
def chunk(parts):
    return formats.data(parts["parquet"], "chunk")


def key_of(name, dataset):
    """The name of a dataset of a pipeline, which one alone does not need."""
    return dataset if len(formats.PIPELINES[name].datasets) > 1 else ""


def file_number(path):
    return int(path.rsplit("-", 1)[1].split(".")[0])


def document_of(found):
    return found.dataset, file_number(found.file), found.record


def followed(run, steps, **more):
    """What provenance says of rows: document, first token, number; by attempt, step."""
    found, asking = {}, run.provenance(**more)
    for step in steps:
        # The run may have gone back past it.
        with contextlib.suppress(errors.DataError):
            for batch in asking.step(step):
                pieces = [
                    (row, *document_of(each), each.first_token, each.num_tokens)
                    for row, in_row in enumerate(batch.rows)
                    for each in in_row
                ]
                for each in itertools.chain(*batch.rows):
                    dataset, *place = document_of(each)
                    assert each.document_tokens == SIZES[dataset or "web", *place]
                found |= {(attempt, step): pieces for attempt in batch.attempts}
    return found


def trained(run, name):
    """The same by the tokens of the run."""
    return {
        key: [
            (row, key_of(name, dataset), *rest)
            for row, inputs in enumerate(of_rows)
            for dataset, *rest in pieces_of(inputs)
        ]
        for key, of_rows in run.inputs.items()
    }


def check_steps(run, name, steps=None, **more):
    """Checks the documents of steps (all by default); those that could be followed."""
    # What the audit reads anew are the rows of the run, byte for byte.
    audited = audit.audit(run.attempts, run.data_of)
    assert audited.passed, audited
    steps = sorted({step for _, step in run.inputs}) if steps is None else steps
    found, expected = followed(run, steps, **more), trained(run, name)
    assert found == {key: expected[key] for key in found}
    lineage = step_log.lineage(run.attempts)
    current = {(lineage[n].attempt, n) for n in steps if n in lineage}
    assert current <= found.keys()
    return found


def check_all(run, name, *, samples, datasets=None):
    """Compares steps, and what is found of documents, with all rows of the run."""
    datasets = datasets or formats.PIPELINES[name].datasets
    uses, asking = collections.defaultdict(list), run.provenance()
    for key, pieces in sorted(check_steps(run, name).items()):
        for row, dataset, file, record, *tokens in pieces:
            uses[dataset, file, record].append((*key, row, *tokens))
    documents = [each for each in SIZES if each[0] in datasets]
    outcomes = collections.Counter()
    for dataset, file, record in documents[:: len(documents) // samples]:
        found = list(asking.find(f"{dataset}-{file}.parquet", record))
        document = key_of(name, dataset), file, record
        assert {document_of(each) for each in found} == {document}
        assert [each.epoch for each in found] == list(range(len(found)))
        named = [
            (use.attempt, use.step, use.row, use.first_token, use.num_tokens)
            for each in found
            for use in each.uses
        ]
        assert sorted(named) == sorted(uses[document])
        for each in found:
            order = [(use.attempt, use.step) for use in each.uses]
            assert order == sorted(order)
            check_outcome(each, SIZES[dataset, file, record], name)
        outcomes.update(each.outcome for each in found)
    return outcomes


def check_outcome(found, size, name):
    is_filtered = formats.PIPELINES[name].filtered and size % 3 == 0
    is_current = any(use.is_current for use in found.uses)
    if found.outcome == "used":
        assert is_current
        assert found.document_tokens == size
    else:
        assert {
            "too_short": size < 2,
            "filtered": is_filtered,
            "left_out": not is_current,
            "read_ahead": not is_filtered,
            "not_yet_used": True,
        }[found.outcome]


@pytest.mark.parametrize(
    "name", [*PIPELINES, pytest.param("everything", marks=pytest.mark.slow)]
)
def test_documents_of_a_step_and_steps_of_a_document(parts, name):
    sizes = [12, 12, 4, 24, 8, 12]
    run = Run().attempt(formats.data(parts["parquet"], name), sizes, saves=(2, 4))
    check_all(run, name, samples=4)
    # A saved state changes only what is read.
    check_steps(run, name, (5,), saved=False)
    if name == "plain":
        for file_format in ("arrayrecord", "jsonl"):
            data = formats.data(parts[file_format], name)
            check_steps(Run().attempt(data, [12] * 2), name, (1,))


@pytest.mark.parametrize(
    ("goes_back", "batches"),
    [(False, [((1, 2), True, 48)]), (True, [((1,), False, 48), ((2,), True, 72)])],
)
def test_step_that_was_trained_again_has_one_batch_unless_rows_were_left_out(
    chunk, goes_back, batches
):
    run = Run().attempt(chunk, [12] * 5, saves=(3,))
    run.attempt(chunk, [12] * 3, start=3, goes_back=goes_back)
    found = list(run.provenance().step(4))
    assert [(b.attempts, b.is_current, b.position) for b in found] == batches
    assert bool(check_all(run, "chunk", samples=30)["left_out"]) == goes_back


def test_steps_that_the_run_left_out_had_batches_of_other_sizes(chunk):
    run = Run().attempt(chunk, [12, 12, 12, 8, 4, 10], saves=(2,))
    run.attempt(chunk, [24, 6, 18], start=3, goes_back=True, saves=(5,))
    assert check_all(run, "chunk", samples=90)["left_out"]


@pytest.mark.parametrize(("name", "size"), [("plain", 24), ("chunk", 4)])
def test_data_that_ends(parts, name, size):
    data = formats.data(parts["parquet"], name, num_epochs=1)
    run = Run().attempt(data, [size] * (40 * 24 // size), saves=(2, 5))
    assert run.attempts[0].records[-1].step > 2
    outcomes = check_all(run, name, samples=10)
    assert not outcomes["not_yet_used"] + outcomes["read_ahead"]


def shuffled(dataset, shard):
    return grain.experimental.WindowShuffleIterDataset(
        dataset, window_size=7, seed=shard
    )


class Others(corpora.Numbers):
    """Numbers in another file."""

    files = ("/data/others-0",)


# A dataset fills its own window again when its turn comes, in any row after a resume.
@pytest.mark.parametrize("is_own", [False, True])
def test_records_without_tokens_that_are_corrupt_filtered_or_in_a_window(is_own):
    numbers = corpora.Numbers(
        blocks=((5, 9, 4), (7, 12)), corrupt=frozenset((3, 11, 20))
    )

    def make_shard(shard):
        read = records.Records(
            numbers,
            shard=shard,
            num_shards=4,
            read_options=records.ReadOptions(shuffle_seed=3, skip_corrupt=True),
        ).filter(lambda element: element["number"] % 5)
        if is_own:
            read = shuffled(read, shard)
        others = records.Records(Others(blocks=((40,),)), shard=shard, num_shards=4)
        others = others.map(lambda e: e | {"number": 1000 + e["number"]})
        parts = {"numbers": read, "others": others} if is_own else {"numbers": read}
        mixed = mixing.Mixture(parts, dict.fromkeys(parts, 1.0), shard=shard)
        return (mixed if is_own else shuffled(mixed, shard)).map(
            lambda e: {"inputs": np.array([e["number"]]), "record": e["record"]}
        )

    data = sharded_data.sharded(make_shard, num_shards=4, pipeline="numbers")
    run = Run().attempt(data, [8] * 13, saves=(4, 9, 13))
    uses = collections.defaultdict(list)
    for (_, step), of_rows in run.inputs.items():
        for row, (number,) in enumerate(of_rows.tolist()):
            uses[number].append((step, row))
    outcomes, asking = collections.Counter(), run.provenance()
    for number in range(2, 37, 9 if is_own else 3):
        file, record = divmod(number, 18) if number < 36 else (1, 18)
        found = list(asking.find(f"numbers-{file}", record))
        named = [(use.step, use.row) for each in found for use in each.uses]
        assert sorted(named) == sorted(uses[number])
        expected = "used" if number % 5 else "filtered"
        if number in numbers.corrupt:
            expected = "corrupt"
        of_number = {each.outcome for each in found}
        assert {expected} <= of_number <= {expected, "read_ahead", "not_yet_used"}
        outcomes.update(of_number)
    assert outcomes["corrupt"] == 2
    for step in (5, 12):
        (batch,) = asking.step(step)
        for row, (document,) in enumerate(batch.rows):
            number = 18 * file_number(document.file) + document.record
            number += 1000 * document.file.startswith("/data/others")
            assert run.inputs[1, step][row].tolist() == [number]


# It ends within an epoch, or with one.
@pytest.mark.parametrize("size", [16, 36])
def test_rows_of_positional_data_are_its_records_in_their_order(corpus, size):
    data = conftest.data_of(corpus)
    run = Run().attempt(data, [8] * 17).attempt(data, [8], start=15)
    run.attempt(data, [size] * 2, start=15, goes_back=True)
    asking, order, uses = run.provenance(), data.order, collections.defaultdict(list)
    known = {
        (attempt, step): batch
        for step in range(17)
        for batch in asking.step(step)
        for attempt in batch.attempts
    }
    # The rows of step 16 of the first attempt were read again in a larger batch.
    assert known.keys() == {(1, n) for n in range(16)} | {(2, 15), (3, 15), (3, 16)}
    for (attempt, step), batch in known.items():
        begin = 8 * step if attempt < 3 else 128 + size * (step - 15)
        assert batch.position == begin
        for row, (piece,) in enumerate(batch.rows):
            expected = order[begin + row], (begin + row) // data.num_records
            assert (piece.record, piece.epoch) == expected
            uses[expected].append((attempt, step, row, 0))
    end = 128 + 2 * size
    places = [order[n] for n in range(2 * data.num_records + 1)]
    for record in {order[n] for n in (0, 120, 127, 128, end - 1, end)}:
        for epoch, found in enumerate(asking.find(corpus, record)):
            assert (found.record, found.epoch) == (record, epoch)
            named = [(u.attempt, u.step, u.row, u.first_token) for u in found.uses]
            assert sorted(named) == sorted(uses[record, epoch])
            place = places.index(record, epoch * data.num_records)
            outcome = "used" if place < end else "not_yet_used"
            assert found.outcome == ("left_out" if 120 <= place < 128 else outcome)
        assert epoch == (end - 1) // data.num_records


def plain(parts):
    return formats.data(parts["parquet"], "plain")


def mapped(parts):
    """Code of the user's after the tokens."""
    make_shard = formats.data(parts["parquet"], "chunk").make_shard
    return sharded_data.sharded(
        lambda shard: make_shard(shard).map(lambda row: row),
        num_shards=12,
        pipeline="mapped",
    )


def own(_):
    numbers = grain.MapDataset.range(40).map(lambda n: {"inputs": np.array([n])})
    return positional_data.positional(numbers.repeat(), pipeline="numbers")


@pytest.mark.parametrize(
    ("make", "question", "message"),
    [
        (plain, ("find", "no.parquet", 0), "no.parquet is not one of"),
        (plain, ("find", "web-1.parquet", 1), "has no record 1: its 1"),
        (plain, ("step", 7), "step 7 was not trained in any attempt"),
        (mapped, ("step", 1), "your step .* processes tokens"),
        (own, ("step", 1), "Positional.*; use .*from_config"),
        (own, ("find", "numbers", 3), "Positional.*; use .*from_config"),
    ],
)
def test_question_that_cannot_be_answered_is_an_error(parts, make, question, message):
    run = Run().attempt(make(parts), [12] * 2)
    ask, *arguments = question
    with pytest.raises(errors.DataError, match=message):
        list(getattr(run.provenance(), ask)(*arguments))


@pytest.fixture(scope="module")
def curriculum(parts):
    """Other weights from step 3 on, other rows from step 6 on, shorter ones from 8."""
    early, late = {"web": 0.7, "code": 0.3}, {"web": 0.2, "code": 0.3, "books": 0.5}
    described = {
        0: {"weights": early},
        3: {"weights": late},
        6: {"length": 31, "packing": "first_fit"},
        8: {"length": 7},
    }
    return staged(parts, described)


def staged(parts, described):
    return stages.staged(
        [
            stages.Stage(begin=begin, data=of_stage(parts["parquet"], **each))
            for begin, each in described.items()
        ]
    )


def test_rows_that_no_step_has_are_those_of_the_next_steps(curriculum):
    run = Run().attempt(curriculum, [12] * 6, saves=(2,))
    run.attempt(curriculum, [6] * 7, start=1, goes_back=True)
    # A crash before the log had them, and one before it had any.
    for number in (3, 1):
        first = run.attempts[0]
        run.attempts[0] = dataclasses.replace(first, records=first.records[:number])
        assert followed(run, [6])[2, 6] == trained(run, "mixture")[2, 6]


def test_documents_of_a_run_that_was_given_stages(curriculum):
    run = Run().attempt(curriculum.stages[0].data, [12] * 4, saves=(2, 3))
    run.attempt(curriculum, [12] * 4 + [6] * 3, start=3, saves=(4, 6, 7))
    check_steps(run, "mixture", (6, 9))


def test_run_that_goes_back_to_before_other_weights(parts):
    before, after = (
        of_stage(parts["parquet"], weights=weights)
        for weights in ({"web": 0.7, "code": 0.3}, {"web": 0.1, "code": 0.9})
    )
    run = Run().attempt(before, [12] * 4).attempt(after, [12] * 3, start=4)
    run.attempt(after, [12] * 5, start=2, goes_back=True)
    check_steps(run, "mixture", (4, 6))


def test_rows_before_a_change_of_batch_size_are_given_no_other_documents(chunk):
    run = Run().attempt(chunk, [4] * 16).attempt(chunk, [8] * 3, start=4)
    # Rows 40 on are those of the first attempt, in places that no batch of 8 leads to.
    assert {step for _, step in check_steps(run, "chunk")} == {*range(7)}
    with pytest.raises(errors.DataError, match="step 7 was trained, but the run roll"):
        list(run.provenance().step(7))
    # A batch of 8 is read and never trained, over rows of the first attempt.
    _, *run.end = run._read(chunk, 8, *run.end)
    check_steps(run.attempt(chunk, [8] * 3, start=4, goes_back=True), "chunk", (6,))


def test_documents_of_stages_that_end(parts):
    size = 12
    described = {
        0: {"weights": {"web": 1.0}},
        200 // size: {"length": 24},
        270 // size: {"weights": {"code": 0.6, "books": 0.4}},
    }
    data = staged(parts, {n: {**each, "epochs": 1} for n, each in described.items()})
    run = Run().attempt(data, [size] * 40, saves=(10, 25))
    assert data.at(run.attempts[0].records[-1].step).number == 2
    outcomes = check_all(run, "mixture", samples=12, datasets=formats.DATASETS)
    assert outcomes["used"] > 8


STAGES = st.fixed_dictionaries(
    {
        "length": st.sampled_from([5, 12, 31]),
        "packing": st.sampled_from(["", "concat_then_split", "first_fit", "best_fit"]),
        "weights": st.sampled_from([{"web": 1.0}, {"books": 1.0, "code": 0.2}]),
    }
)
# A start that goes back so many steps, and the sizes of its batches.
STARTS = st.tuples(
    st.integers(0, 3), st.lists(st.sampled_from([4, 6, 12]), min_size=1, max_size=6)
)
TWICE = [(0, [12] * 6 + [6] * 2), (3, [18, 4, 4, 4]), (7, [18] * 4 + [4] * 3)]


@pytest.mark.slow
@given(
    described=st.lists(STAGES, min_size=1, max_size=3),
    starts=st.lists(STARTS, min_size=1, max_size=3),
    saves=st.sets(st.integers(1, 14), max_size=6),
)
@settings(max_examples=6)
@example(
    [{"length": 12, "packing": "first_fit", "weights": formats.WEIGHTS}] * 2,
    TWICE,
    {2, 5},
)
def test_documents_of_any_run_over_stages_that_goes_back(
    parts, described, starts, saves
):
    data = staged(parts, {3 * number: each for number, each in enumerate(described)})
    run, step = Run(), 0
    for back, sizes in starts:
        step = max(0, step - back)
        run.attempt(data, sizes, start=step, goes_back=bool(run.attempts), saves=saves)
        step += len(sizes)
    names = {name for each in described for name in each["weights"]}
    check_all(run, "mixture", samples=5, datasets=names)
