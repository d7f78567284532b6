"""The page of metrics and events has each of them, and nothing else."""

import pathlib
import re

import elastic_ckpt.monitoring
from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import goodput, prometheus

PAGE = pathlib.Path(elastic_ckpt.monitoring.__file__).parent / "METRICS.md"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "events.txt"


def rows(heading):
    """The cells of each row of the tables below a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_has_every_event_with_its_fields_in_order():
    listed = [
        f"{name.strip('`')}: {', '.join(re.findall(r'`(.*?)`', fields))}"
        for name, fields, _ in rows("Events")
    ]
    assert listed == GOLDEN.read_text().splitlines()


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
