"""The page of a report is well-formed, and its plots stay within their frames."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import metrics
from elastic_ckpt.inspect import plot, report, report_page, run_record

VALUES = st.floats(-1e9, 1e9, allow_nan=False) | st.integers(-5, 5).map(float)


def numbers(path):
    return [float(each) for each in re.findall(r"-?[0-9.]+", path)]


@given(
    points=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=40),
    kind=st.sampled_from(["line", "steps", "area", "dots"]),
    is_log=st.booleans(),
    from_zero=st.booleans(),
)
def test_everything_is_drawn_within_the_frame(points, kind, is_log, from_zero):
    if is_log:
        points = [(x, abs(y) + 1e-3) for x, y in points]
    lines = plot.Lines(
        title="a < b",
        description="d",
        x_label="x",
        y_label="y",
        series=[plot.Series(name="s", points=sorted(points), kind=kind)],
        is_log=is_log,
        from_zero=from_zero and not is_log,
    )
    root = ElementTree.fromstring(lines.svg())
    width, height = map(float, root.get("viewBox").split()[2:])
    assert root.find("title").text == "a < b"
    drawn = 0
    for path in root.iter("path"):
        if path.get("class") != "grid":
            xs, ys = numbers(path.get("d"))[::2], numbers(path.get("d"))[1::2]
            assert all(0 <= x <= width for x in xs)
            assert all(0 <= y <= height for y in ys)
            drawn += 1
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cx")) <= width
        assert 0 <= float(circle.get("cy")) <= height
        drawn += 1
    assert drawn


def test_a_long_series_keeps_its_extremes():
    points = [(float(n), 1.0) for n in range(10_000)]
    points[5_555] = (5555.0, 99.0)
    thinned = plot._thinned(points)
    assert len(thinned) < 1_000
    assert (5555.0, 99.0) in thinned


SECONDS = st.integers(0, 10**6).map(lambda number: number / 8)


@given(st.lists(st.lists(SECONDS, min_size=2, max_size=2), min_size=1, max_size=8))
def test_bars_are_as_long_as_their_parts(rows):
    bars = plot.Bars(
        title="t",
        description="d",
        rows=[(str(place), values) for place, values in enumerate(rows)],
        parts=[("a", 0), ("b", 1)],
        unit="s",
    )
    svg = re.search("<svg.*</svg>", bars.svg())[0]
    rects = list(ElementTree.fromstring(svg).iter("rect"))
    assert len(rects) == sum(
        later > earlier
        for values in rows
        for earlier, later in ((0.0, values[0]), (values[0], sum(values)))
    )
    most = max(map(sum, rows), default=0)
    lengths = sum(float(rect.get("width")) for rect in rects)
    scale = (plot._WIDTH - plot._BAR_LEFT - plot._BAR_RIGHT) / (most or 1)
    assert lengths == pytest.approx(sum(map(sum, rows)) * scale, abs=1)


def record(**changes):
    values = {
        "run": "<r>",
        "directory": "runs/r",
        "events": [],
        "files": {},
        "attempts": [],
        "mixtures": [],
        "audit": "No audit.",
        "made_secs": 0.0,
    }
    return run_record.Record(**values | changes)


def test_a_run_without_anything_has_a_page():
    page = report.report(record())
    assert "Run &lt;r&gt;" in page
    assert "The slices did not change." in page
    assert "<script" not in page


def attempt(number, start_step, losses, hosts=4):
    return run_record.Attempt(
        number=number, start_step=start_step, hosts=hosts, losses=losses
    )


def test_steps_that_a_later_attempt_repeats_do_not_count():
    attempts = [attempt(1, 0, [1.0] * 12), attempt(2, 10, []), attempt(3, 8, [2.0])]
    counted = record(attempts=attempts).attempts_with_counted()
    assert [num for _, num in counted] == [8, 0, 1]


def test_goodput_is_the_sum_over_all_starts_and_files():
    name = metrics.GOODPUT_SECS["productive"].name
    lines = [{"metric": name, "sum": 2.0, "time": 1.0, "step": 1}]
    content = record(files={"run": lines, "host-00000": lines})
    assert content.goodput_secs()["productive"] == 4.0
    assert [line["sum"] for line in content.lines(metrics.GOODPUT_SECS["productive"])]


def test_a_failed_audit_is_shown_with_its_reason():
    audit = {"passed": False, "first_difference": "step 3, row 1", "num_steps": 9}
    page = report.report(record(audit=audit | {"missing_checkpoint": ""}))
    assert '<strong class="bad">FAILED</strong> step 3, row 1' in page


def test_replicas_that_differ_are_listed_with_step_leaf_and_hosts():
    compared = {
        "event": "validated", "step": 30, "level": "quick", "findings": 1,
        "secs": 0.1, "time": 2.0,
    }  # fmt: skip
    differ = {
        "event": "replicas_differ", "step": 30, "leaf": "opt/mu", "hosts": [1, 3],
        "devices": [4], "is_certain": True, "why": "device 4 differs", "time": 1.0,
    }  # fmt: skip
    page = report.report(record(events=[differ, compared]))
    assert '<strong class="bad">DIFFER</strong>' in page
    assert "1 parts differed, in 1 steps" in page
    row = ["30", "opt/mu", "1, 3", "device 4 differs"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in page
    assert '<strong class="good">EQUAL</strong>' in report.report(
        record(events=[compared])
    )
    assert "Replicas" not in report.report(record())


def test_each_colour_has_a_style():
    page = report_page.page("t", "s", [], [])
    for colour in range(plot.COLOURS):
        assert page.count(f"--c{colour}:") == 2
        assert f".f{colour} {{ fill: var(--c{colour})" in page
