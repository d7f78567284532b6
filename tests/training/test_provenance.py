"""The documents that provenance names are those whose tokens the rows have.

The oracle is the one-host run itself: no token is in two documents, so that the rows of
a step say which documents they are made of.
"""

import collections
import contextlib
import dataclasses
import itertools
import pathlib

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import mixing, positional_data, records, sharded_data, stages
from elastic_ckpt.training import audit, step_log
from tests import corpora, formats
from tests.training.recorded_run import SIZES, Run, pieces_of


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    """Gives the data of a pipeline over files of a format, or of stages."""
    directory = tmp_path_factory.mktemp("formats")
    parts = {
        name: formats.write(directory, name)
        for name in ("arrayrecord", "jsonl", "parquet")
    }

    def data(described):
        if isinstance(described, str):
            name, *more = described.split()
            epochs = 1 if more == ["once"] else None
            file_format = "parquet" if epochs or not more else more[0]
            return formats.data(parts[file_format], name, num_epochs=epochs)
        made = [
            stages.Stage(begin=n, data=formats.of_stage(parts["parquet"], **each))
            for n, each in described.items()
        ]
        return stages.staged(made) if len(made) > 1 else made[0].data

    return data


def place(found):
    """The file and the record of what is found; the file tells its dataset."""
    stem = pathlib.Path(found.file).stem
    assert found.dataset in ("", stem.rpartition("-")[0])
    return stem, found.record


def current(run):
    """The attempt and the number of each step that counts."""
    lineage = step_log.lineage(run.attempts)
    return {(each.attempt, step) for step, each in lineage.items()}


def followed(run, steps, **more):
    """What provenance says of rows: document, first token, number; by attempt, step."""
    logged = {(r.attempt, r.step): r for each in run.attempts for r in each.records}
    found, asking = {}, run.provenance(**more)
    for step in steps:
        # The run may have gone back past it.
        with contextlib.suppress(errors.DataError):
            for batch in asking.step(step):
                pieces = [
                    (row, *place(each), each.first_token, each.num_tokens)
                    for row, in_row in enumerate(batch.rows)
                    for each in in_row
                ]
                for each in itertools.chain(*batch.rows):
                    assert each.document_tokens == SIZES.get(place(each))
                found |= {(attempt, step): pieces for attempt in batch.attempts}
                first = logged[batch.attempts[0], step]
                same = [k for k, r in logged.items() if r.digest == first.digest]
                assert batch.attempts == tuple(attempt for attempt, _ in same)
                assert batch.position == first.row
                assert batch.is_current == bool({*same} & current(run))
    return found


def trained(run, of_row=pieces_of):
    """The same by the tokens of the run."""

    def of_rows(rows):
        return [(n, *each) for n, row in enumerate(rows) for each in of_row(row)]

    return {key: of_rows(rows) for key, rows in run.inputs.items()}


def check(run, documents, fates, *, of_row=pieces_of, suffix=".parquet"):
    """Compares steps, and what is found of documents, with all rows of the run.

    `fates` says what may become of a document that was read. Returns what became of
    each of the documents, by epoch.
    """
    # What the audit reads anew are the rows of the run, byte for byte.
    audited = audit.audit(run.attempts, run.data_of)
    assert audited.passed, audited
    expected, newest = trained(run, of_row), max(step for _, step in current(run))
    found = followed(run, {step for _, step in run.inputs})
    assert found == {key: expected[key] for key in found}
    assert current(run) <= found.keys()
    # A saved state changes only what is read.
    assert followed(run, [newest], saved=False).items() <= found.items()
    uses, outcomes, asking = collections.defaultdict(list), {}, run.provenance()
    for (attempt, step), pieces in sorted(found.items()):
        is_current = (attempt, step) in current(run)
        for row, stem, record, *tokens in pieces:
            uses[stem, record].append((attempt, step, is_current, row, *tokens))
    for stem, record in documents:
        epochs, named = [*asking.find(stem + suffix, record)], []
        for number, each in enumerate(epochs):
            assert (*place(each), each.epoch) == (stem, record, number)
            assert each.outcome in {"not_yet_used", *fates(stem, record)}
            order = [(use.attempt, use.step) for use in each.uses]
            assert order == sorted(order)
            is_used = any(use.is_current for use in each.uses)
            assert is_used == (each.outcome == "used")
            assert each.document_tokens == SIZES.get((stem, record)) or not is_used
            named += map(dataclasses.astuple, each.uses)
        named = sorted((a, n, *more) for n, a, *more in named)
        assert named == sorted(uses[stem, record])
        assert epochs
        outcomes[stem, record] = [each.outcome for each in epochs]
    return outcomes


def ran(of, data, attempts):
    """A run of attempts: the first step, the sizes, and the steps that are saved.

    A first step below 0 has the run go back to it, and leave out what came since. The
    last data is that of all attempts that follow.
    """
    run, made = Run(), [*map(of, data)]
    for number, (start, sizes, saves) in enumerate(attempts):
        more = {"goes_back": start < 0, "saves": saves}
        run.attempt(made[: number + 1][-1], sizes, start=abs(start), **more)
    return run


SIX = [(0, [12, 12, 4, 24, 8, 12], {2, 4})]
SIMPLE = ["plain", "filter", "chunk", "window_shuffle", "first_fit", "mixture"]
BOOKS = {"books": 1.0, "code": 0.2}
FIRST = {0: {"weights": {"web": 0.7, "code": 0.3}}}
OTHER_WEIGHTS = {0: {"weights": {"web": 0.1, "code": 0.9}}}
# Other weights from step 3 on, other rows from step 6 on, shorter ones from 8.
CURRICULUM = {
    **FIRST,
    3: {"weights": {"web": 0.2, "code": 0.3, "books": 0.5}},
    6: {"length": 31, "packing": "first_fit"},
    8: {"length": 7},
}
ENDING = {
    0: {"epochs": 1, "weights": {"web": 1.0}},
    16: {"epochs": 1, "length": 24},
    22: {"epochs": 1, "weights": {"code": 0.6, "books": 0.4}},
}
TWICE = {n: {"packing": "first_fit"} for n in (0, 3)}
SAME = {n: {"weights": {"web": 1.0}} for n in (0, 3)}


# Data, attempts, and every so-many-th document to find.
@pytest.mark.parametrize(
    ("data", "attempts", "every"),
    [
        *(([name], SIX, 42 if name != "mixture" else 72) for name in SIMPLE),
        pytest.param(["everything"], SIX, 72, marks=pytest.mark.slow),
        (["plain arrayrecord"], SIX, 0),
        (["plain jsonl"], SIX, 0),
        # Steps are trained again: the same rows, or others.
        (["chunk"], [(0, [12] * 5, {3}), (3, [12] * 3, ())], 5),
        (["chunk"], [(0, [12] * 5, {3}), (-3, [12] * 3, ())], 5),
        (["chunk"], [(0, [12, 12, 12, 8, 4, 10], {2}), (-3, [24, 6, 18], {5})], 2),
        # Rows 40 on are in places that no batch of 8 leads to. Then a batch is read and
        # never trained on, over rows of the first attempt.
        (["chunk"], [(0, [4] * 16, ()), (4, [8] * 3, ())], 0),
        (["chunk"], [(0, [4] * 16, ()), (4, [8] * 3 + [-8], ()), (-4, [8] * 3, ())], 0),
        # The data ends.
        (["plain once"], [(0, [24] * 40, {2, 5})], 17),
        (["chunk once"], [(0, [4] * 240, {2, 5})], 17),
        ([ENDING], [(0, [12] * 40, {10, 25})], 24),
        # A run is given stages, or other weights from which it goes back to before.
        ([FIRST, CURRICULUM],
         [(0, [12] * 4, {2, 3}), (3, [12] * 4 + [6] * 3, {4, 6, 7})], 0),
        ([FIRST, OTHER_WEIGHTS],
         [(0, [12] * 4, ()), (4, [12] * 3, ()), (-2, [12] * 5, ())], 0),
        ([TWICE],
         [(0, [12] * 6 + [6] * 2, {2, 5}), (-5, [18, 4, 4, 4], ()),
          (-2, [18] * 4 + [4] * 3, {5})], 17),
        # Some shards have no row in a stage until the run has gone back over it.
        ([SAME], [(0, [6, 6, 6, 4], ()), (-2, [4], ())], 0),
    ],
)  # fmt: skip
def test_documents_of_steps_and_steps_of_documents(of, data, attempts, every):
    steps = formats.PIPELINES.get(str(data[0]).split()[0], formats.PIPELINES["mixture"])

    def fates(*document):
        short = {"too_short"} if SIZES[document] < 2 else set()
        if steps.filtered and SIZES[document] % 3 == 0:
            return {"filtered", *short}
        return {"read_ahead", *(short or {"used", "left_out"})}

    known = [each for each in SIZES if each[0].partition("-")[0] in steps.datasets]
    documents = known[::every] if every else []
    outcomes = check(ran(of, data, attempts), documents, fates)
    found = {*itertools.chain(*outcomes.values())}
    if every:
        assert "used" in found
        assert ("left_out" in found) == any(start < 0 for start, *_ in attempts)
    if "once" in str(data) or "epochs" in str(data):
        assert not found & {"not_yet_used", "read_ahead"}


@pytest.mark.slow
@given(st.data())
@settings(max_examples=6)
def test_documents_of_any_run_over_stages_that_goes_back(of, drawn):
    described, attempts, step = {}, [], 0
    for first in range(0, drawn.draw(st.sampled_from([1, 4, 7])), 3):
        packings = ["", "concat_then_split", "first_fit", "best_fit"]
        described[first] = {
            "length": drawn.draw(st.sampled_from([5, 12, 31])),
            "packing": drawn.draw(st.sampled_from(packings)),
            "weights": drawn.draw(st.sampled_from([{"web": 1.0}, BOOKS])),
        }
    saves = drawn.draw(st.sets(st.integers(1, 14), max_size=6))
    for _ in range(drawn.draw(st.integers(1, 3))):
        step = max(0, step - drawn.draw(st.integers(0, 3)))
        of_batches = st.lists(st.sampled_from([4, 6, 12]), min_size=1, max_size=6)
        attempts.append((-step, sizes := drawn.draw(of_batches), saves))
        step += len(sizes)
    names = {name for each in described.values() for name in each["weights"]}
    known = [each for each in SIZES if each[0].partition("-")[0] in names]
    fates = {"read_ahead", "too_short", "used", "left_out"}
    check(ran(of, [described], attempts), known[:: len(known) // 5], lambda *_: fates)


def test_rows_that_no_step_has_are_those_of_the_next_steps(of):
    attempts = [(0, [12] * 6, {2}), (-1, [6] * 7, ())]
    run = ran(of, [CURRICULUM], attempts)
    # A crash before the log had them, and one before it had any.
    for number in (3, 1):
        first = run.attempts[0]
        run.attempts[0] = dataclasses.replace(first, records=first.records[:number])
        assert followed(run, [6])[2, 6] == trained(run)[2, 6]


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
        def shuffled(dataset):
            return grain.experimental.WindowShuffleIterDataset(
                dataset, window_size=7, seed=shard
            )

        options = records.ReadOptions(shuffle_seed=3, skip_corrupt=True)
        of_shard = {"shard": shard, "num_shards": 4}
        read = records.Records(numbers, **of_shard, read_options=options)
        parts = {"numbers": read.filter(lambda element: element["number"] % 5)}
        if is_own:
            others = records.Records(Others(blocks=((40,),)), **of_shard)
            others = others.map(lambda e: e | {"number": 1000 + e["number"]})
            parts = {"numbers": shuffled(parts["numbers"]), "others": others}
        mixed = mixing.Mixture(parts, dict.fromkeys(parts, 1.0), shard=shard)
        return (mixed if is_own else shuffled(mixed)).map(
            lambda e: {"inputs": np.array([e["number"]]), "record": e["record"]}
        )

    def of_row(inputs):
        (number,) = inputs.tolist()
        if number >= 1000:
            return [("others-0", number - 1000, 0, None)]
        file = min(number // 18, 1)
        return [(f"numbers-{file}", number - 18 * file, 0, None)]

    def fate(stem, record):
        number = 18 * int(stem[-1]) + record
        is_corrupt = number in numbers.corrupt
        return "corrupt" if is_corrupt else "used" if number % 5 else "filtered"

    data = sharded_data.sharded(make_shard, num_shards=4, pipeline="numbers")
    run = Run().attempt(data, [8] * 13, saves=(4, 9, 13))
    asked = [(f"numbers-{n // 18}", n % 18) for n in (2, 5, 11, 20, 29, 35)]
    fates = lambda *each: {fate(*each), "read_ahead"}  # noqa: E731
    outcomes = check(run, asked, fates, of_row=of_row, suffix="")
    assert all(fate(*each) in found for each, found in outcomes.items())


def mapped(of):
    """Code of the user's after the tokens."""
    make_shard = of("chunk").make_shard
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
        ("plain", ("find", "no.parquet", 0), "no.parquet is not one of"),
        ("plain", ("find", "web-1.parquet", 1), "has no record 1: its 1"),
        ("plain", ("step", 7), "step 7 was not trained in any attempt"),
        ("plain", ("step", 2), "step 2 was trained, but the run rolled back past"),
        (mapped, ("step", 1), "your step .* processes tokens"),
        (own, ("step", 1), "Positional.*; use .*from_config"),
        (own, ("find", "numbers", 3), "Positional.*; use .*from_config"),
    ],
)
def test_question_that_cannot_be_answered_is_an_error(of, make, question, message):
    data = of(make) if isinstance(make, str) else make(of)
    run = Run().attempt(data, [12] * 3).attempt(data, [24], start=1)
    ask, *arguments = question
    with pytest.raises(errors.DataError, match=message):
        list(getattr(run.provenance(), ask)(*arguments))
