"""The page of metrics and events has each of them, and nothing else."""

import pathlib
import re

import elastic_ckpt.monitoring
from elastic_ckpt.core import events, metrics
from elastic_ckpt.monitoring import goodput, prometheus

PAGE = pathlib.Path(elastic_ckpt.monitoring.__file__).parent / "METRICS.md"
WHERE = "elastic_ckpt/monitoring/METRICS.md"


def rows(heading):
    """The cells of each row of the tables below a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_has_every_event_with_its_fields_in_order():
    listed = {
        name.strip("`"): tuple(re.findall(r"`(.*?)`", fields))
        for name, fields, _ in rows("Events")
    }
    for name, fields in events.NAMES.items():
        row = f"`{name}` | {', '.join(f'`{field}`' for field in fields)}"
        assert listed.get(name) == fields, f"write it in {WHERE}: | {row} | ... |"
    for name in listed:
        assert name in events.NAMES, f"no event is called {name}; edit {WHERE}"
    # In the order of the code, which groups them.
    assert [*listed] == [*events.NAMES], f"sort the events in {WHERE}"


def test_the_page_has_every_metric_with_its_kind_and_its_name_in_prometheus():
    endings = {"counter": "_total", "gauge": "", "duration": ""}
    listed = {name: (kind, there) for name, kind, there, _ in rows("Metrics")}
    assert listed == {
        f"`{name.removeprefix('/elastic_ckpt/')}`": (
            metric.kind,
            f"`{prometheus.spelling(metric)}{endings[metric.kind]}`",
        )
        for name, metric in metrics.METRICS.items()
    }


def test_the_page_says_of_each_metric_what_the_code_says():
    for (name, _, _, meaning), metric in zip(
        rows("Metrics"), metrics.METRICS.values(), strict=True
    ):
        assert meaning == metric.meaning, name


def test_every_cause_of_lost_time_is_explained():
    text = goodput.__doc__ or ""
    for cause in goodput.CAUSES:
        assert re.search(rf"^{cause} ", text, re.MULTILINE), cause
