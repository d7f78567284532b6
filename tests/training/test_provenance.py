"""The documents that provenance names are those whose tokens the rows have.

The oracle is the one-host run itself: no token of `tests.formats` is in two documents,
so that the rows of a step say which documents they are made of.
"""

import collections
import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data import (
    example_id,
    mixing,
    positional_data,
    records,
    rows,
    sharded_data,
    shuffling,
    stages,
    state,
)
from elastic_ckpt.data import provenance as documents
from elastic_ckpt.data.lm import language, multimodal, pipeline, token_blocks
from elastic_ckpt.training import provenance, step_log, step_record
from tests import corpora, formats
from tests.data import test_stages

each_pipeline = pytest.mark.parametrize("name", formats.PIPELINES)

# Where each token of the documents is from: dataset, file, record and index.
ORIGINS = {}
# The tokens of each document, by dataset, file and record.
SIZES = {}
for _name, _counts in formats.DATASETS.items():
    _places = [(_f, _n) for _f, _count in enumerate(_counts) for _n in range(_count)]
    for _number, _place in enumerate(_places):
        _tokens = formats.tokens(_name, _number).tolist()
        SIZES[_name, *_place] = len(_tokens)
        ORIGINS |= {_t: (_name, *_place, _i) for _i, _t in enumerate(_tokens)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats.Single, "passes_on", True, raising=False)
        yield {
            name: formats.write(directory, name)
            for name in ("arrayrecord", "jsonl", "parquet")
        }


def pieces_of(inputs):
    """The pieces of documents in the tokens of a row, in order."""
    pieces = []
    for token in inputs[inputs > 0].tolist():
        *document, index = ORIGINS[token]
        if pieces and pieces[-1][:3] == document and sum(pieces[-1][3:]) == index:
            pieces[-1][4] += 1
        else:
            pieces.append([*document, index, 1])
    return [tuple(each) for each in pieces]


def digests_of(batch):
    tokens = np.concatenate(digest.row_features(batch), axis=1)
    return digest.row_digests(tokens).tolist()


class Run:
    """A simulated run: its step log, its saved states, and the rows it trained on."""

    def __init__(self):
        self.attempts, self.saved = [], []
        self.data, self.after, self.left_out = {}, {}, ()
        self.host, self.read = None, None
        # The tokens of the rows of each step of each attempt, and their digests.
        self.inputs, self.digests = {}, {}

    def attempt(
        self, data, sizes, *, start=0, skip=0, goes_back=False, saves=(), listed=True
    ):
        """Trains from step `start` on, with batches of these sizes.

        Args:
          data: of the attempt.
          sizes: of the batches.
          start: the first step.
          skip: how many rows the attempt leaves out before it.
          goes_back: whether it leaves out those that the attempt before took since.
          saves: the steps after which the data state is saved.
          listed: whether the step log lists ids.
        """
        number = len(self.attempts) + 1
        self.data[number] = data
        position, cursors = self.after.get(start, (0, {}))
        if skip:
            self.left_out = (*self.left_out, (position, position + skip))
            _, position, cursors = self._read(data, skip, position, cursors)
        if goes_back:
            earlier = [each for each in self.left_out if each[1] <= position]
            before, (position, cursors) = position, self.end
            self.left_out = (*earlier, (before, position))
        logged = []
        for size in sizes:
            # Batches of nothing but padding are no steps.
            step = start + len(logged)
            of_step = stages.at(data, step)
            batch, position, cursors = self._read(of_step, size, position, cursors)
            self.end = position, cursors
            if "mask" in batch and not batch["mask"].any():
                continue
            self.after[step + 1] = position, cursors
            ids = tuple(example_id.join(batch["example_id"]))
            logged.append(
                step_record.StepRecord(
                    step=step,
                    loss=1.0,
                    digest="00" * 16,
                    num_rows=size,
                    attempt=number,
                    runs=ids if listed else (),
                )
            )
            self.inputs[number, step] = batch["inputs"]
            self.digests[number, step] = digests_of(batch)
            if step + 1 in saves:
                self._save(step + 1, data, position, cursors)
        self.attempts.append(
            step_log.Attempt(
                attempt=number,
                start_step=start,
                hosts=1,
                slices=1,
                devices=1,
                data={"number": str(data.identity())},
                records=tuple(logged),
                left_out=self.left_out,
            )
        )
        return self

    def _read(self, data, size, position, cursors):
        if self.host is None or self.read != (size, position, data):
            placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=size)
            self.host = data.host_batches(placement)
            if position:
                name = "stream_row" if data.engine == "sharded" else "global_next_index"
                self.host.go_to(
                    {name: position}, lambda shards: {s: cursors[s] for s in shards}
                )
        batch = next(self.host)
        position = state.row_of(self.host.position())
        self.read = size, position, data
        return batch, position, dict(self.host.shard_cursors())

    def _save(self, step, data, position, cursors):
        name = "stream_row" if data.engine == "sharded" else "global_next_index"
        saved = state.DataState(
            engine=data.engine,
            position={name: position},
            pipeline=data.identity(),
            left_out=self.left_out,
            progress=stages.Course.first(data, 1).at_step(step).progress,
        )
        self.saved.append(
            provenance.SavedData(
                step=step,
                state=saved,
                cursors=lambda shards: {shard: cursors[shard] for shard in shards},
            )
        )

    def provenance(self, *, saved=True, **more):
        return provenance.Provenance(
            self.attempts,
            self.data.__getitem__,
            saved=self.saved if saved else (),
            **more,
        )


def asked(run, step):
    """The documents of each row of a step, by attempt."""
    found = {}
    for batch, of_batch in run.step(step):
        in_rows = {each.row: each.documents for each in of_batch}
        assert sorted(in_rows) == list(range(batch.num_rows))
        pieces = [
            [(*_document(each), each.first_token, each.num_tokens) for each in in_row]
            for _, in_row in sorted(in_rows.items())
        ]
        for each in (piece for of_row in in_rows.values() for piece in of_row):
            document = each.dataset or "web", _file(each.file), each.record
            assert each.document_tokens == SIZES[document]
        for attempt in batch.attempts:
            found[attempt] = pieces
    return found


def _document(of):
    return of.dataset, _file(of.file), of.record


def _file(path):
    return int(path.rsplit("-", 1)[1].split(".")[0])


def trained(run, step, *, named):
    """The same by the tokens of the run."""
    return {
        attempt: [
            [(name if named else "", *rest) for name, *rest in pieces_of(inputs)]
            for inputs in of_rows
        ]
        for (attempt, number), of_rows in run.inputs.items()
        if number == step
    }


def is_mixed(name):
    return len(formats.PIPELINES[name].datasets) > 1


def check_steps(run, name, steps, **more):
    asking = run.provenance(**more)
    for step in steps:
        assert asked(asking, step) == trained(run, step, named=is_mixed(name))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name == "everything" or name.endswith("_singly")
        else name
        for name in formats.PIPELINES
    ],
)
def test_the_documents_of_a_step(parts, name):
    sizes = [12, 12, 4, 24, 8, 12]
    run = Run().attempt(formats.data(parts["parquet"], name), sizes, saves=(2, 4))
    # Buffers of packed mixtures take the longest to fill.
    check_steps(run, name, (1, 3, 5) if name == "concat_then_split" else (5,))


@pytest.mark.parametrize("file_format", ["arrayrecord", "jsonl"])
def test_the_documents_of_a_step_of_other_formats(parts, file_format):
    data = formats.data(parts[file_format], "everything")
    run = Run().attempt(data, [12] * 3, saves=(2,))
    check_steps(run, "everything", (2,))


@pytest.mark.parametrize("name", ["window_shuffle", "concat_then_split", "chunk"])
def test_a_saved_state_changes_only_what_is_read(parts, name):
    run = Run().attempt(
        formats.data(parts["parquet"], name), [12] * 10, saves=(2, 4, 8)
    )
    for saved, from_step, num_rows in ((True, 8, 2 * 12), (False, None, 10 * 12)):
        readings = []
        check_steps(run, name, (9,), saved=saved, announce=readings.append)
        (reading,) = readings
        assert (reading.from_step, reading.num_rows) == (from_step, num_rows)
        assert reading.shards == tuple(range(12))
        assert (reading.num_bytes is None) == (not saved)


def test_only_the_shards_of_a_small_batch_are_read(parts):
    run = Run().attempt(formats.data(parts["parquet"], "first_fit"), [4] * 7)
    readings = []
    check_steps(run, "first_fit", (4,), announce=readings.append)
    (reading,) = readings
    assert (reading.shards, reading.num_rows) == ((4, 5, 6, 7), 2 * 4)
    assert reading.num_records is None


def test_a_step_that_was_trained_again_has_one_batch(parts):
    data = formats.data(parts["parquet"], "mixture")
    run = Run().attempt(data, [12] * 5, saves=(3,)).attempt(data, [12] * 3, start=3)
    (batch,) = run.provenance().batches(4)
    assert (batch.attempts, batch.is_current) == ((1, 2), True)
    check_steps(run, "mixture", (2, 4, 5))


def test_a_step_that_left_rows_out_has_two_batches(parts):
    data = formats.data(parts["parquet"], "mixture")
    run = Run().attempt(data, [12] * 5, saves=(3,))
    run.attempt(data, [12] * 3, start=3, skip=24)
    first, second = run.provenance().batches(4)
    assert (first.attempts, first.is_current, first.position) == ((1,), False, 48)
    assert (second.attempts, second.is_current, second.position) == ((2,), True, 72)
    check_steps(run, "mixture", (2, 4, 5))


def reweighted(parts, web):
    """The mixture with another weight of a dataset."""
    data = formats.data(parts["parquet"], "mixture")
    return data, dataclasses.replace(
        data,
        make_shard=dataclasses.replace(
            data.make_shard,
            make_shard=Reweighted(make=data.make_shard.make_shard, web=web),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Reweighted:
    make: formats.MakeShard
    web: float

    def __call__(self, shard):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(formats, "WEIGHTS", formats.WEIGHTS | {"web": self.web})
            return self.make(shard)


def test_weights_that_change_when_a_run_continues(parts):
    before, after = reweighted(parts, 5.0)
    run = Run().attempt(before, [12] * 5, saves=(3, 5))
    run.attempt(after, [12] * 4, start=3, saves=(6,))
    # Of the steps 3 and 4 there are two versions, so the state of step 5 is of no use.
    readings = []
    check_steps(run, "mixture", (1, 4, 6), announce=readings.append)
    assert {each.from_step for each in readings} == {None, 3, 6}
    assert run.inputs[1, 4].tolist() != run.inputs[2, 4].tolist()
    check_found(run, "mixture", samples=4)


def all_uses(run, name):
    """For each document, the steps with pieces of it."""
    uses = collections.defaultdict(list)
    for (attempt, step), of_rows in sorted(run.inputs.items()):
        for row, inputs in enumerate(of_rows):
            for dataset, *document, first, number in pieces_of(inputs):
                if not is_mixed(name):
                    dataset = ""
                uses[dataset, *document].append((attempt, step, row, first, number))
    return uses


def check_found(run, name, *, samples=None, datasets=None, **more):
    """Compares what is found of documents with what is in all rows of the run."""
    datasets = datasets or formats.PIPELINES[name].datasets
    uses, asking = all_uses(run, name), run.provenance(**more)
    documents = [each for each in SIZES if each[0] in datasets]
    step = max(len(documents) // samples, 1) if samples else 1
    outcomes = collections.Counter()
    for dataset, file, record in documents[::step]:
        found = list(asking.find(f"{dataset}-{file}.parquet", record))
        key = (dataset if is_mixed(name) else "", file, record)
        assert {_document(each) for each in found} == {key}
        assert [each.epoch for each in found] == list(range(len(found)))
        named = [
            (use.attempt, use.step, use.row, use.first_token, use.num_tokens)
            for each in found
            for use in each.uses
        ]
        assert sorted(named) == sorted(uses[key])
        outcomes.update(each.outcome for each in found)
        for each in found:
            check_outcome(each, SIZES[dataset, file, record], name)
    return outcomes


def check_outcome(found, size, name):
    if found.outcome == "used":
        assert any(use.is_current for use in found.uses)
        assert found.document_tokens == size
    elif found.outcome == "too_short":
        assert size < 2
    elif found.outcome == "filtered":
        assert formats.PIPELINES[name].filtered
        assert size % 3 == 0
    else:
        assert found.outcome in ("read_ahead", "not_yet_used", "left_out")


def check_uses(parts, name, samples):
    data = formats.data(parts["parquet"], name)
    # Over one epoch, with states before and at the end.
    run = Run().attempt(data, [12] * 26, saves=(4, 9, 15, 26))
    outcomes = check_found(run, name, samples=samples)
    assert outcomes["used"] > samples / 4


@pytest.mark.parametrize(
    "name", ["chunk", "concat_then_split", "window_shuffle", "first_fit"]
)
def test_the_steps_of_a_document(parts, name):
    check_uses(parts, name, samples=5)


@pytest.mark.slow
@each_pipeline
def test_the_steps_of_many_documents(parts, name):
    check_uses(parts, name, samples=40)


@pytest.mark.slow
def test_every_document_of_three_epochs(parts):
    run = Run().attempt(
        formats.data(parts["parquet"], "concat_then_split"), [24] * 30, saves=(7, 16)
    )
    outcomes = check_found(run, "concat_then_split")
    assert outcomes["used"] > 300
    assert outcomes["too_short"] > 5


@pytest.mark.slow
def test_documents_of_a_run_that_went_back(parts):
    data = formats.data(parts["parquet"], "chunk")
    run = Run().attempt(data, [12] * 5, saves=(3,))
    run.attempt(data, [12] * 3, start=3, skip=24)
    outcomes = check_found(run, "chunk", samples=30)
    assert outcomes["left_out"]
    asking = run.provenance()
    lost = next(
        each
        for record in range(90)
        for each in asking.find("web-0.parquet", record)
        if each.outcome == "left_out"
    )
    assert {use.attempt for use in lost.uses} == {1}
    assert not any(use.is_current for use in lost.uses)


def test_documents_of_a_run_that_crashed(parts):
    data = formats.data(parts["parquet"], "best_fit")
    run = Run().attempt(data, [12] * 5, saves=(3,)).attempt(data, [8] * 2, start=3)
    check_found(run, "best_fit", samples=15)


@pytest.mark.parametrize(("name", "size"), [("plain", 24), ("chunk", 4)])
def test_data_that_ends(parts, name, size):
    data = formats.data(parts["parquet"], name, num_epochs=1)
    run = Run().attempt(data, [size] * (40 * 24 // size), saves=(2, 5))
    assert len(run.attempts[0].records) > 3
    last = run.attempts[0].records[-1].step
    check_steps(run, name, (last // 2, last))
    outcomes = check_found(run, name, samples=10)
    readings = []
    run.provenance(announce=readings.append)
    # Which batches had no rows, so that no step has them, is seen in all shards.
    assert [each.shards for each in readings] == [tuple(range(12))] * (size < 12)
    assert not outcomes["not_yet_used"] + outcomes["read_ahead"]


def test_a_long_document_that_is_truncated(parts):
    run = Run().attempt(formats.data(parts["parquet"], "plain"), [12] * 20)
    asking = run.provenance()
    (record,) = [n for n in range(90) if SIZES["web", 0, n] == 30][:1]
    first = next(iter(asking.find("web-0.parquet", record)))
    (use,) = first.uses
    assert (use.first_token, use.num_tokens) == (0, formats.LENGTH)
    assert first.document_tokens == 30


def test_rows_with_the_field_record_are_followed_without_tokens(parts):
    def make_shard(shard):
        options = records.ReadOptions(shuffle_seed=3)
        read = {
            part.name: records.Records(
                part.source, shard=shard, num_shards=4, read_options=options
            )
            for part in parts["arrayrecord"]
        }
        weights = dict.fromkeys(read, 1.0)
        return mixing.Mixture(read, weights, shard=shard).map(
            lambda e: {
                "inputs": np.resize(np.append(e["tokens"][:1], 0), 1),
                "record": e["record"],
            }
        )

    data = sharded_data.sharded(make_shard, num_shards=4, pipeline="first tokens")
    run = Run().attempt(data, [8] * 6, saves=(3,))
    for step in (1, 5):
        ((_, of_batch),) = run.provenance().step(step)
        named = {
            each.row: [_document(of) for of in each.documents] for each in of_batch
        }
        for row, inputs in enumerate(run.inputs[1, step]):
            (document,) = named[row]
            assert inputs[0] in (0, *_first_tokens(document))


def _first_tokens(document):
    return [t for t, origin in ORIGINS.items() if origin == (*document, 0)]


def test_records_without_tokens_that_are_corrupt_filtered_or_in_a_window():
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
        shuffled = shuffling.WindowShuffle(read, window_size=7, seed=shard)
        return shuffled.map(
            lambda e: {"inputs": np.array([e["number"]]), "record": e["record"]}
        )

    data = sharded_data.sharded(make_shard, num_shards=4, pipeline="numbers")
    run = Run().attempt(data, [8] * 13, saves=(4, 9, 13))
    uses = collections.defaultdict(list)
    for (_, step), of_rows in run.inputs.items():
        for row, (number,) in enumerate(of_rows.tolist()):
            uses[number].append((step, row))
    outcomes, asking = collections.Counter(), run.provenance()
    for number in range(2, 37, 3):
        file, record = divmod(number, 18) if number < 36 else (1, 18)
        found = list(asking.find(f"numbers-{file}", record))
        named = [(use.step, use.row) for each in found for use in each.uses]
        assert sorted(named) == sorted(uses[number])
        unused = {"read_ahead", "not_yet_used"}
        expected = "used"
        if number in numbers.corrupt:
            expected = "corrupt"
        elif not number % 5:
            expected = "filtered"
        found_outcomes = {each.outcome for each in found}
        assert expected in found_outcomes
        assert found_outcomes <= {expected} | unused
        outcomes.update(found_outcomes)
    assert outcomes["corrupt"] == 2
    for step in (5, 12):
        ((_, of_batch),) = asking.step(step)
        for each in of_batch:
            (document,) = each.documents
            number = 18 * _file(document.file) + document.record
            assert run.inputs[1, step][each.row].tolist() == [number]


def test_tokens_that_are_checked_against_a_vocabulary(parts):
    data = test_stages.of_stage(parts["parquet"])
    checked = dataclasses.replace(data.make_shard, vocab_size=max(ORIGINS) + 1)
    run = Run().attempt(dataclasses.replace(data, make_shard=checked), [12] * 3)
    check_steps(run, "mixture", (2,))


def test_code_of_the_users_after_the_tokens_is_refused(parts):
    base = formats.data(parts["parquet"], "chunk").make_shard

    data = sharded_data.sharded(
        lambda shard: base(shard).map(lambda row: row), num_shards=12, pipeline="mapped"
    )
    run = Run().attempt(data, [12] * 2)
    with pytest.raises(errors.DataError, match="of your own code, works on tokens"):
        asked(run.provenance(), 1)


def test_packed_rows_with_media_are_refused_with_what_to_do_instead(parts):
    def make_shard(shard):
        source = parts["parquet"][0].source
        made = records.Records(source, shard=shard, num_shards=12)
        return multimodal.packed_multimodal(
            made.map(lambda record: [record["tokens"]]),
            modalities={},
            length=100,
            seed=shard,
        )

    data = sharded_data.sharded(make_shard, pipeline="pictures")
    message = "packed_multimodal does, and name none of them; read the run's batches"
    with pytest.raises(errors.DataError, match=message):
        documents.FollowedShard(data.make_shard, 0).next()


def test_preference_pairs_are_refused_with_what_to_do_instead(tmp_path):
    path = tmp_path / "pairs.jsonl"
    pair = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    path.write_text(40 * (json.dumps(pair) + "\n"))
    data = pipeline.from_config(
        grain_train_files=str(path),
        grain_file_type="jsonl",
        train_data_columns="prompt,chosen,rejected",
        use_dpo=True,
        max_target_length=16,
        num_logical_shards=12,
    )
    message = "a preference pair .use_dpo.*; read the run's batches again"
    with pytest.raises(errors.DataError, match=message):
        documents.FollowedShard(data.make_shard, 0).next()


@pytest.mark.parametrize("listed", [True, False])
def test_positional_data(corpus, listed):
    data = positional_data.PositionalData(files=(corpus,), max_target_length=16)
    run = Run().attempt(data, [8] * 17, listed=listed)
    run.attempt(data, [16] * 2, start=15, skip=8, listed=listed)
    order = data.record_numbers()
    readings = []
    asking = run.provenance(announce=readings.append)
    expected = collections.defaultdict(list)
    for attempt in run.attempts:
        position = 0 if attempt.attempt == 1 else 15 * 8 + 8
        for record in attempt.records:
            ((batch, of_batch),) = [
                (b, list(r))
                for b, r in asking.step(record.step)
                if attempt.attempt in b.attempts
            ]
            assert batch.position == position
            named = [(each.row, each.documents[0]) for each in of_batch]
            for row, piece in named:
                assert piece.record == order[position + row]
                assert piece.epoch == (position + row) // data.num_records()
                expected[piece.record].append((attempt.attempt, record.step, row))
            position += record.num_rows
    assert bool(readings) == (not listed)
    for record in range(0, data.num_records(), 40):
        uses = [
            (use.attempt, use.step, use.row)
            for found in asking.find(corpus, record)
            for use in found.uses
        ]
        assert sorted(uses) == sorted(expected[record])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run: list(run.find("no.parquet", 0)), "no.parquet is not a file of"),
        (lambda run: list(run.find("web-1.parquet", 1)), "has no record 1: its 1"),
        (lambda run: run.batches(7), "no attempt of the run trained step 7; its steps"),
    ],
)
def test_what_cannot_be_answered(parts, ask, message):
    run = Run().attempt(formats.data(parts["parquet"], "plain"), [12] * 2)
    with pytest.raises(errors.DataError, match=message):
        ask(run.provenance())


def test_the_states_of_other_files_are_refused(parts):
    run = Run().attempt(formats.data(parts["parquet"], "plain"), [12] * 2, saves=(1,))
    other = run.saved[0].state.pipeline | {"pipeline": "other"}
    run.saved[0] = dataclasses.replace(
        run.saved[0], state=dataclasses.replace(run.saved[0].state, pipeline=other)
    )
    with pytest.raises(errors.DataError, match="saved by another pipeline"):
        run.provenance()


def test_a_log_without_the_step_before_a_start_is_refused(parts):
    data = formats.data(parts["parquet"], "plain")
    run = Run().attempt(data, [12] * 2).attempt(data, [12] * 2, start=2)
    run.attempts[0] = dataclasses.replace(
        run.attempts[0], records=run.attempts[0].records[:1]
    )
    with pytest.raises(errors.DataError, match="step 1 is missing from the step log"):
        run.provenance()


def check_stages(run, datasets, *, steps, samples):
    """Checks both answers for a run of stages, whose datasets always have names."""
    check_steps(run, "mixture", steps)
    return check_found(run, "mixture", samples=samples, datasets=datasets)


@pytest.fixture(scope="module")
def curriculum(parts):
    """Other weights from step 3 on, other rows from step 6 on, shorter ones from 8."""
    read = parts["parquet"]
    early, late = {"web": 0.7, "code": 0.3}, {"web": 0.2, "code": 0.3, "books": 0.5}
    return stages.staged(
        [
            stages.Stage(begin=0, data=of_stage(read, weights=early)),
            stages.Stage(begin=3, data=of_stage(read, weights=late)),
            stages.Stage(begin=6, data=of_stage(read, length=31, packing="first_fit")),
            stages.Stage(begin=8, data=of_stage(read, length=7)),
        ]
    )


@pytest.mark.parametrize("size", [12, 6])
def test_rows_that_no_step_has_are_those_of_the_next_steps(curriculum, size):
    run = Run().attempt(curriculum, [12] * 6, saves=(2,))
    run.attempt(curriculum, [size] * 7, start=1, goes_back=True)
    # A crash before the log had them, and one before it had any.
    for number in (3, 1):
        (first, last) = run.attempts
        kept = dataclasses.replace(first, records=first.records[:number])
        run.attempts = [kept, last]
        assert asked(run.provenance(), 6)[2] == trained(run, 6, named=True)[2]


@pytest.mark.parametrize("size", [12, 4])
def test_documents_of_stages_that_end(parts, size):
    read = parts["parquet"]
    early, late = {"web": 1.0}, {"code": 0.6, "books": 0.4}
    data = stages.staged(
        [
            stages.Stage(begin=0, data=of_stage(read, weights=early, epochs=1)),
            stages.Stage(begin=200 // size, data=of_stage(read, length=24, epochs=1)),
            stages.Stage(
                begin=270 // size, data=of_stage(read, weights=late, epochs=1)
            ),
        ]
    )
    run = Run().attempt(data, [size] * (480 // size), saves=(10, 25))
    last = run.attempts[0].records[-1].step
    assert data.at(last).number == 2
    outcomes = check_stages(run, formats.DATASETS, steps=(9, last - 1), samples=12)
    assert outcomes["used"] > 8


@pytest.mark.slow
def test_documents_of_stages_of_a_users_pipeline(parts):
    web = {"parquet": parts["parquet"][2:]}
    data = stages.staged(
        [
            stages.Stage(begin=0, data=test_stages.own_pipeline(web, length=12)),
            stages.Stage(begin=3, data=test_stages.own_pipeline(web, length=30)),
        ]
    )
    run = Run().attempt(data, [12] * 6, saves=(2, 4))
    check_steps(run, "plain", (2, 3, 5))
    check_found(run, "plain", samples=12)


@pytest.mark.slow
def test_documents_of_a_dataset_that_a_stage_leaves_out(parts):
    def mixed(length, *names):
        return sharded_data.sharded(
            functools.partial(make_mixed, parts["parquet"], length, names),
            pipeline="mixed, version 1",
        )

    data = stages.staged(
        [
            stages.Stage(begin=0, data=mixed(12, "books", "web")),
            stages.Stage(begin=2, data=mixed(30, "web")),
            stages.Stage(begin=4, data=mixed(12, "books", "web")),
        ]
    )
    run = Run().attempt(data, [12] * 7, saves=(1, 3, 5))
    check_stages(run, ("books", "web"), steps=(1, 2, 4, 6), samples=15)


def make_mixed(parts, length, names, shard):
    read = {
        part.name: token_blocks.Tokens(
            records.Records(part.source, shard=shard, num_shards=6),
            documents=test_stages.TOKENS,
        )
        for part in parts
        if part.name in names
    }
    mixed = mixing.Mixture(read, dict.fromkeys(read, 1.0), shard=shard)
    examples = language.Examples(mixed, length=length, truncate=False)
    return language.packed(examples, packing="first_fit", length=length, seed=shard)


def of_stage(parts, **more):
    return test_stages.of_stage(parts, window=4, **more)


@pytest.mark.slow
def test_documents_of_stages(curriculum):
    run = Run().attempt(curriculum, [12] * 6 + [6] * 4, saves=(2, 5, 6, 7, 9))
    outcomes = check_stages(run, formats.DATASETS, steps=range(10), samples=20)
    assert outcomes["used"] > 5
    asking = run.provenance(announce=(readings := []).append)
    for step in (5, 6, 7, 8):
        assert asked(asking, step)
    # Reading begins at the last state, of whichever stage.
    assert [each.from_step for each in readings] == [5, 6, 7, 7]


@pytest.mark.night
def test_documents_of_stages_that_a_resized_run_went_back_over(curriculum):
    run = Run().attempt(curriculum, [12] * 6 + [6] * 2, saves=(2, 5, 7))
    run.attempt(curriculum, [18, 4, 4, 4], start=5, saves=(6, 8))
    run.attempt(curriculum, [18] * 4 + [4] * 3, start=2, goes_back=True, saves=(4, 7))
    # The rows that are left out now are those of three stages, two of them twice.
    run.attempt(curriculum, [12] * 5, start=2, goes_back=True, saves=(4,))
    outcomes = check_stages(run, formats.DATASETS, steps=range(1, 9, 2), samples=11)
    assert outcomes["left_out"]
    assert outcomes["used"]


def test_documents_of_a_run_that_was_given_stages(curriculum):
    plain = curriculum.stages[0].data
    run = Run().attempt(plain, [12] * 4, saves=(2, 3))
    run.attempt(curriculum, [12] * 5, start=3, saves=(4, 7))
    check_stages(run, ("web", "code", "books"), steps=range(8), samples=8)


@given(
    chosen=test_stages.schedules(),
    saves=st.sets(st.integers(1, 20), max_size=6),
    first=st.integers(0, 30),
)
@settings(max_examples=test_stages.MOST_EXAMPLES)
@pytest.mark.slow
def test_documents_of_many_schedules_of_stages(parts, chosen, saves, first):
    described, schedule = chosen
    data = stages.staged(
        [
            stages.Stage(
                begin=begin, data=test_stages.of_stage(parts["parquet"], **each)
            )
            for begin, each in described
        ]
    )
    run, attempts = Run(), []
    for number, (step, _, size) in enumerate(schedule):
        if not number or step != schedule[number - 1][0] + 1:
            attempts.append((step, []))
        attempts[-1][1].append(size)
    for start, sizes in attempts:
        run.attempt(data, sizes, start=start, goes_back=bool(run.attempts), saves=saves)
    names = sorted({name for _, each in described for name in each["weights"]})
    check_steps(run, "mixture", {step for step, *_ in schedule[first % 4 :: 4]})
    check_found(run, "mixture", samples=6, datasets=names)
