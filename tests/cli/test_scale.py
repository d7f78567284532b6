"""A request for slices is refused before it is written, or shown until it is done."""

import json

import pytest

from elastic_ckpt.cli import scale
from elastic_ckpt.elastic import decision, scale_request
from elastic_ckpt.training import load, run_directory, schema
from tests import runs


def event(name, **fields):
    return {"time": 0.0, "event": name, **fields}


FOUR = event("world_started", world=1, slices=[0, 1, 2, 3], spares=[])
REQUESTED = event("scale_requested", slices=2, chosen=[0, 1])
TWO = event("world_started", world=2, slices=[0, 1], spares=[2, 3])
RECOVERED = event("recovered", world=2)


@pytest.mark.parametrize(
    ("new", "text"),
    [
        ([], None),
        ([REQUESTED], None),
        ([REQUESTED, event("world_leaving", slices=[0, 1]), TWO], None),
        ([REQUESTED, TWO, RECOVERED], "the run is on slices 0, 1"),
        # One of an earlier change.
        ([RECOVERED, REQUESTED], None),
    ],
)
def test_the_result_is_known_when_the_next_world_trains(new, text):
    assert scale.result([FOUR, *new], 2, known=1) == text


def test_a_run_that_is_on_these_slices_needs_no_change():
    events = [FOUR, REQUESTED, TWO, RECOVERED, REQUESTED]
    assert scale.result(events, 2, known=4) == "the run is on slices 0, 1"


def test_slices_that_are_not_there_are_named():
    requested = event("scale_requested", slices=5, chosen=[0, 1, 2, 3])
    assert scale.result([FOUR, requested], 5, known=1) == (
        "the run is on slices 0, 1, 2, 3; 5 are requested, and it takes more when they"
        " are there"
    )


@pytest.fixture
def run(tmp_path, corpus):
    def made(**settings):
        values = {"hosts": 4, "slices": 4, "global_batch_size": 12, **settings}
        config = load.load(runs.write_config(tmp_path, corpus, **values))
        directory = tmp_path / "tiny"
        directory.mkdir(exist_ok=True)
        run_directory.write_config(str(directory), config)
        return directory

    return made


@pytest.mark.parametrize(
    ("slices", "settings", "message"),
    [
        (2, {}, "was not started with elastic_enabled=true"),
        (5, {"elastic_enabled": True}, "--slices 5: the run trains on 4 to 4 slices"),
        (
            1,
            {"elastic_enabled": True, "elastic_min_slice_count": 2},
            "--slices 1: the run trains on 2 to 4 slices",
        ),
        (
            4,
            {"elastic_enabled": True, "elastic_max_slice_count": 3},
            "--slices 4: the run trains on 3 to 3 slices",
        ),
        (
            3,
            {
                "elastic_enabled": True,
                "elastic_min_slice_count": 2,
                "global_batch_size": 16,
            },
            "16 rows do not divide over the 3 devices of 3",
        ),
        (
            3,
            {"elastic_enabled": True, "elastic_min_slice_count": 2},
            "is not running; start it",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_not_written(
    run, slices, settings, message
):
    directory = run(**settings)
    ended = [event("run_finished", step=1, secs=1.0)]
    lines = "".join(json.dumps(each) + "\n" for each in ended)
    (directory / run_directory.EVENTS).write_text(lines)
    assert message in runs.verb("scale", directory, "--slices", slices, code=1)
    assert not (directory / scale_request.FILE).exists()


def test_requests_are_read_once_each_and_end_with_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_request, "_LOOK_SECS", 0.0)
    configured = decision.Policy(min_slices=2, max_slices=4)
    scale_request.write(tmp_path, 3)
    present = scale_request.ScaledPolicy(tmp_path, configured)
    assert present() is configured
    for slices, most in ((3, 3), (3, 3), (9, 4), (1, 2)):
        before = present()
        scale_request.write(tmp_path, slices)
        assert present().max_slices == most
        # Another object each time, and then the same one.
        assert present() is not before
        assert present() is present()
    before = present()
    (tmp_path / scale_request.FILE).write_text("{")
    assert present() is before


# The clients are those of the other tests, and slower for S3.
@pytest.mark.parametrize(
    "bucket",
    ["gs", pytest.param("s3", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_run_in_a_bucket_reads_requests_there(bucket, monkeypatch):
    monkeypatch.setattr(scale_request, "_BUCKET_LOOK_SECS", 0.0)
    configured = decision.Policy(min_slices=2, max_slices=4)
    run_directory.write_config(bucket, schema.Config())
    refused = runs.verb("scale", bucket, "--slices", "2", code=1)
    assert "was not started with elastic_enabled=true" in refused
    scale_request.write(bucket, 3)
    present = scale_request.ScaledPolicy(bucket, configured)
    # That of an earlier start.
    assert present() is configured
    for slices in (3, 2):
        scale_request.write(bucket, slices)
        assert present().max_slices == slices
        assert present() is present()
