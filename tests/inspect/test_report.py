"""The page of a report says what happened, and its plots show all of it."""

import functools
import re
import sys
import types
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.inspect import page
from elastic_ckpt.training import report

VALUES = st.floats(-1e9, 1e9, allow_nan=False) | st.integers(-5, 5).map(float)
record = functools.partial(
    report.Record,
    **{"run": "<r>", "directory": "runs/r", "phase": "finished", "files": {}},
    **{"mixtures": [], "audit": "No audit.", "made_secs": 0.0},
)


# Vega draws in a tenth of a second.
@settings(max_examples=6)
@given(
    points=st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=40),
    kind=st.sampled_from(["line", "steps", "area", "dots"]),
    is_log=st.booleans(),
)
def test_every_point_is_drawn_within_the_frame(points, kind, is_log):
    if is_log:
        points = [(x, abs(y) + 1e-3) for x, y in points]
    series = page.Series(name="s", points=sorted(points), kind=kind)
    spec = page.lines([series], x="x", y="y", is_log=is_log, from_zero=not is_log)
    root = ElementTree.fromstring(page.svg(spec, title="a < b"))
    assert root.get("aria-label") == "a < b"
    width, height = map(float, root.get("viewBox").split()[2:])
    assert width == page.WIDTH
    paths = [each.attrib for each in root.iter() if each.tag.endswith("}path")]
    drawn = [p for p in paths if page.COLOURS[0] in (p.get("stroke"), p.get("fill"))]
    assert len(drawn) == len(points) if kind == "dots" else drawn
    for path in drawn if kind != "dots" else ():
        numbers = [*map(float, re.findall(r"-?[0-9.]+(?:e-?\d+)?", path["d"]))]
        assert -1 <= min(numbers[::2]) <= max(numbers[::2]) <= width
        assert -1 <= min(numbers[1::2]) <= max(numbers[1::2]) <= height


def test_steps_that_a_later_attempt_repeats_do_not_count():
    attempts = [
        types.SimpleNamespace(
            start_step=start, records=[types.SimpleNamespace(loss=1)] * num
        )
        for start, num in ((0, 12), (10, 0), (8, 1))
    ]
    counted = record(events=[], attempts=attempts)
    assert counted.counted == [8, 0, 1]
    assert counted.losses(is_counted=True) == [(n, 1) for n in range(1, 10)]
    assert counted.losses(is_counted=False) == [(n, 1) for n in range(9, 13)]


def test_interruption_is_shown_with_its_evidence_and_what_it_cost(monkeypatch):
    judged = {
        "event": "verdict", "time": 60.0, "world": 1, "kind": "slice_lost",
        "what": "slice", "which": "1", "phase": "train", "step": 30, "since": 59.0,
        "evidence": ["host 1: killed by SIGKILL", "no memory"], "action": "leave out",
        "why": "slice 1 is lost",
    }  # fmt: skip
    survived = judged | {"time": 150.0, "what": "storage", "which": "", "why": "full"}
    phases = dict.fromkeys(report._PHASES, 1.0)
    back = {"event": "recovered", "time": 90.0, "world": 2, **phases}
    back |= {"steps_lost": 5, "secs": 7.0}
    began = {"event": "world_started", "time": 0.0, "slices": [0], "spares": []}
    told = record(events=[began, judged, back, survived], attempts=[])
    evidence = "host 1: killed by SIGKILL; no memory"
    for cells in (
        ["1.00", "slice 1", "slice 1 is lost", evidence, "leave out", "7.0 s", "5"],
        ["2.50", "storage", "full", evidence, "leave out", "", ""],
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in report.report(told)
    told = record(events=[began], attempts=[])
    assert "Nothing failed." in report.report(told)
    # Without the extra an error names it.
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(errors.ConfigError, match=r"vl-convert .*'\.\[report\]'"):
        page.library()
