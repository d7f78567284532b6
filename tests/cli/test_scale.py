"""A request for slices is refused before it is written, or shown until it is done."""

import pytest

from elastic_ckpt.cli import scale
from elastic_ckpt.core import storage
from elastic_ckpt.elastic import decision, scale_request
from elastic_ckpt.training import run_directory, schema


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
def test_result_is_known_when_the_next_world_trains(new, text):
    assert scale.result([FOUR, *new], 2, known=1) == text


def test_run_that_is_on_these_slices_needs_no_change():
    events = [FOUR, REQUESTED, TWO, RECOVERED, REQUESTED]
    assert scale.result(events, 2, known=4) == "the run is on slices 0, 1"


def test_requests_are_read_once_each_and_end_with_the_start(tmp_path, monkeypatch):
    directory = str(tmp_path)
    monkeypatch.setattr(scale_request, "_LOOK_SECS", 0.0)
    run_directory.write_config(directory, schema.Config())
    configured = decision.Policy(min_slices=2, max_slices=4)
    scale_request.write(directory, 3)
    present = scale_request.ScaledPolicy(directory, configured)
    assert present() is configured
    for slices, most in ((3, 3), (3, 3), (9, 4), (1, 2)):
        before = present()
        scale_request.write(directory, slices)
        assert present().max_slices == most
        # Another object each time, and then the same one.
        assert present() is not before
        assert present() is present()
    before = present()
    (storage.absolute(directory) / scale_request.FILE).write_text("{")
    assert present() is before
