"""The page of a report says what happened, and its plots show all of it."""

import re
import sys
import types
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.inspect import page
from elastic_ckpt.training import report, step_log

VALUES = st.floats(-1e9, 1e9, allow_nan=False) | st.integers(-5, 5).map(float)
SVG = "{http://www.w3.org/2000/svg}"


def drawn(spec):
    return ElementTree.fromstring(page.svg(spec, title="a < b"))


def texts(root):
    return ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]


def numbers(path):
    return [float(each) for each in re.findall(r"-?[0-9.]+(?:e-?\d+)?", path)]


# Vega draws in a tenth of a second.
@settings(max_examples=6)
@given(
    points=st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=40),
    kind=st.sampled_from(["line", "steps", "area", "dots"]),
    is_log=st.booleans(),
    from_zero=st.booleans(),
)
def test_every_point_is_drawn_within_the_frame(points, kind, is_log, from_zero):
    if is_log:
        points = [(x, abs(y) + 1e-3) for x, y in points]
    series = page.Series(name="s", points=sorted(points), kind=kind)
    spec = page.lines([series], x="x", y="y", is_log=is_log, from_zero=from_zero)
    root = drawn(spec)
    width, height = map(float, root.get("viewBox").split()[2:])
    assert root.get("aria-label") == "a < b"
    assert width == page.WIDTH
    coloured = [
        each
        for each in root.iter(f"{SVG}path")
        if page.COLOURS[0] in (each.get("stroke"), each.get("fill"))
    ]
    if kind == "dots":
        assert len(coloured) == len(points)
    for path in coloured:
        if kind != "dots":
            xs, ys = numbers(path.get("d"))[::2], numbers(path.get("d"))[1::2]
            assert all(-1 <= x <= width for x in xs)
            assert all(-1 <= y <= height for y in ys)
    assert coloured


def test_without_the_extra_an_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(errors.ConfigError, match=r"vl-convert .*'\.\[report\]'"):
        report.report(record(attempts=[attempt(1, 0, [1.0])]))


def record(**changes):
    values = {
        "run": "<r>",
        "directory": "runs/r",
        "phase": "finished",
        "events": [],
        "files": {},
        "attempts": [],
        "mixtures": [],
        "audit": "No audit.",
        "made_secs": 0.0,
    }
    return report.Record(**values | changes)


def attempt(number, start_step, losses, hosts=4):
    return step_log.Attempt(
        attempt=number,
        start_step=start_step,
        hosts=hosts,
        slices=1,
        devices=hosts,
        data={},
        records=tuple(types.SimpleNamespace(loss=loss) for loss in losses),
    )


def test_steps_that_a_later_attempt_repeats_do_not_count():
    attempts = [attempt(1, 0, [1.0] * 12), attempt(2, 10, []), attempt(3, 8, [2.0])]
    counted = record(attempts=attempts)
    assert counted.counted == [8, 0, 1]
    assert [step for step, _ in counted.losses(is_counted=True)] == [*range(1, 10)]
    assert [step for step, _ in counted.losses(is_counted=False)] == [9, 10, 11, 12]


def test_interruption_is_shown_with_its_evidence_and_what_it_cost():
    judged = {
        "event": "verdict", "time": 60.0, "world": 1, "kind": "slice_lost",
        "what": "slice", "which": "1", "phase": "train", "step": 30, "since": 59.0,
        "evidence": ["host 1: killed by SIGKILL", "no memory"], "action": "leave out",
        "why": "slice 1 is lost",
    }  # fmt: skip
    survived = judged | {"time": 150.0, "what": "storage", "which": "", "why": "full"}
    phases = dict.fromkeys(report._PHASES, 1.0)
    back = {
        "event": "recovered", "time": 90.0, "world": 2, "steps_lost": 5, "secs": 7.0,
    }  # fmt: skip
    began = {"event": "world_started", "time": 0.0, "slices": [0], "spares": []}
    text = report.report(record(events=[began, judged, back | phases, survived]))
    cells = ["1.00", "slice 1", "slice 1 is lost"]
    cells += ["host 1: killed by SIGKILL; no memory", "leave out", "7.0 s", "5"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    cells = ["2.50", "storage", "full", "; ".join(judged["evidence"]), "leave out"]
    assert "".join(f"<td>{cell}</td>" for cell in [*cells, "", ""]) in text
    assert "Nothing failed." in report.report(record(events=[began]))
