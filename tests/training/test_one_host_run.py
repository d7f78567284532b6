"""The run on one host leaves out what a run left out, in batches as that took it."""

import dataclasses

import pytest

from elastic_ckpt.data import stages
from elastic_ckpt.training import audit, stream
from tests import formats
from tests.data import test_stages
from tests.training import test_provenance


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return formats.write(tmp_path_factory.mktemp("formats"), "parquet")


def curriculum(parts):
    of_stage = test_provenance.of_stage
    return stages.staged(
        [
            stages.Stage(begin=0, data=of_stage(parts, weights={"web": 1.0})),
            stages.Stage(begin=3, data=of_stage(parts, weights={"books": 1.0})),
            stages.Stage(begin=6, data=of_stage(parts, length=31)),
        ]
    )


def check(run):
    placed = stream.Stream(run.attempts, run.data.__getitem__)
    placed.place()
    oracle = audit.OneHostRun(placed)
    for trained in sorted(placed.trained, key=lambda each: each.record.step):
        if trained.is_current:
            made, record = oracle.next(trained), trained.record
            assert made.digests.tolist() == run.digests[record.attempt, record.step]
    oracle.close()


def test_a_run_that_goes_back_over_a_stage_twice(parts):
    data = curriculum(parts)
    run = test_provenance.Run().attempt(data, [12] * 5)
    run.attempt(data, [12] * 4, start=1, goes_back=True)
    run.attempt(data, [12] * 7, start=1, goes_back=True)
    check(run)


@pytest.mark.slow
def test_a_run_that_goes_back_with_batches_of_other_sizes(parts):
    data = curriculum(parts)
    run = test_provenance.Run().attempt(data, [12] * 6 + [6] * 2)
    run.attempt(data, [18, 4, 4, 4], start=5)
    run.attempt(data, [18] * 4 + [4] * 3, start=2, goes_back=True)
    run.attempt(data, [12] * 5, start=2, goes_back=True)
    check(run)


def test_a_run_that_goes_back_to_before_other_weights(parts):
    before, after = (
        test_provenance.of_stage(parts, weights=weights)
        for weights in ({"web": 0.7, "code": 0.3}, {"web": 0.1, "code": 0.9})
    )
    run = test_provenance.Run().attempt(before, [12] * 4)
    run.attempt(after, [12] * 3, start=4)
    run.attempt(after, [12] * 5, start=2, goes_back=True)
    check(run)


def test_a_run_whose_datasets_get_other_names(parts):
    def named(**names):
        chosen = [
            dataclasses.replace(part, name=names[part.name])
            for part in parts
            if part.name in names
        ]
        weights = dict.fromkeys(names.values(), 1.0)
        return test_stages.of_stage(chosen, weights=weights, packing="", truncate=True)

    configured = [
        named(web="train"),
        named(web="web", code="code"),
        named(code="train"),
        named(code="web", books="train"),
    ]
    run, before = test_provenance.Run(), None
    for number, data in enumerate(configured):
        continued = data if before is None else data.continuing(before)
        run.attempt(continued, [12] * 3, start=3 * number)
        before = continued.identity()
        run.data[number + 1] = data
    assert list(before["datasets"]) == ["train#2", "code"]
    check(run)
