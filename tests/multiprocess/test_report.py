"""The report of a real run that lost a slice, in a real browser, and its status."""

import json

import numpy as np
import pytest

from elastic_ckpt.core import append_log
from tests import browser, corpora, runs, shared_memory
from tests.multiprocess import callbacks

# Of each figure the drawings that are shown, their size on the page, and the sizes and
# colours of what they draw.
PLOTS = """
Array.from(document.querySelectorAll('figure')).map(figure => {
  const size = each => { const r = each.getBoundingClientRect();
                         return [r.width, r.height]; };
  const shown = Array.from(figure.querySelectorAll('svg')).filter(
    each => size(each)[0] > 0);
  const drawn = Array.from(shown[0].querySelectorAll(
    '.role-mark path:not(.background):not(.foreground), .role-mark line'));
  return {title: shown[0].getAttribute('aria-label'), size: size(shown[0]),
          shown: shown.length, drawn: drawn.map(size),
          colours: drawn.map(each => {
            const style = getComputedStyle(each);
            return style.stroke === 'none' ? style.fill : style.stroke; })};
})
"""
TITLES = [
    "Where the time went",
    "Slices over time",
    "Loss",
    "Step time",
    "Time of each change",
    "Newest step of each tier",
    "Mixture",
    "Sample order, and steps of each attempt",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    for name, numbers in (("odd", (0, 60)), ("even", (60, 120))):
        file = directory / f"{name}.parquet"
        corpora.write_parquet(file, corpora.documents(*numbers))
    with shared_memory.directory("report") as ram:
        config = runs.write_config(
            directory,
            str(directory / "odd.parquet"),
            grain_train_files=f"{directory}/odd.parquet,1;{directory}/even.parquet,3",
            grain_file_type="parquet",
            packing=True,
            num_logical_shards=8,
            hosts=2,
            slices=2,
            steps=40,
            elastic_enabled=True,
            elastic_min_slice_count=1,
            elastic_settle_seconds=3600,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=4,
            multi_tier_checkpointing_backup_interval_steps=8,
            faults=[{"kill_slice": 1, "at_step": 22}],
            training_callbacks=callbacks.named(callbacks.held),
        )
        ended = runs.cli("train", config)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        # A terminal is not silent while the hosts start and compile.
        assert "compiling for step 1\n" in ended.stdout
        yield directory / "tiny"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_dark"), [(1000, False), (390, True)])
def test_the_report_reads_well_in_a_browser(run, tmp_path, width, is_dark):
    output = runs.verb("report", run)
    assert f"wrote {run}/report.html" in output
    with browser.page(tmp_path / "profile") as page:
        page.open(f"file://{run}/report.html", is_dark=is_dark, width=width)
        plots = page.evaluate(PLOTS)
        text = page.evaluate("document.body.innerText")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page_width = page.evaluate("document.documentElement.scrollWidth")
        fonts = page.evaluate(
            "Array.from(document.querySelectorAll('svg text'))"
            ".map(each => each.getBoundingClientRect().height).filter(h => h > 0)"
        )
        assert page.messages == []
        # The page is one file.
        assert page.requests == [f"file://{run}/report.html"]
        means, deviations = np.array(page.rows(page.screenshot())).T
    assert [plot["title"] for plot in plots] == TITLES
    for plot in plots:
        assert plot["shown"] == 1, plot
        assert min(plot["size"]) > 50, plot
        assert max(plot["size"]) <= width, plot
        assert any(max(size) > 20 for size in plot["drawn"]), plot
        assert set(plot["colours"]) & {"none", background} == set(), plot
    assert page_width <= width
    assert min(fonts) > 8
    assert (means.mean() < 100) == is_dark
    # Text and lines stand out from the background on most of the page.
    assert (deviations > 5).mean() > 0.5
    for shown in ("finished", "40 of 40", "slice 1 is lost", "killed by SIGKILL"):
        assert shown in text
    assert "PASSED Each of the 40 steps used the examples" in text
    assert "No example was lost or repeated" in text


@pytest.mark.slow
def test_the_status_of_a_run_agrees_with_its_log(run):
    content = json.loads(runs.verb("status", run, "--json"))
    assert content["phase"] == "finished"
    assert content["progress"]["step"] == content["progress"]["steps"] == 40
    assert content["progress"]["loss"] == runs.steps(run)[-1].loss
    assert 0 < content["progress"]["goodput_percent"] < 100
    assert {each["tier"]: each["step"] for each in content["tiers"]} == {
        "local": 40,
        "persistent": 40,
    }
    assert content["last_event"]["event"] == "run_finished"


@pytest.mark.slow
def test_the_series_of_a_run_go_on_in_its_next_world(run):
    lines = append_log.read(run / "metrics" / "run.jsonl")
    worlds = {}
    for metric in ("train/loss", "train/tokens_per_sec", "train/learning_rate"):
        points = [
            (line["step"], line["last"])
            for line in lines
            if line["metric"] == f"/elastic_ckpt/{metric}"
        ]
        assert {step for step, _ in points} == set(range(1, 41)), metric
        worlds[metric] = dict(points)
    losses = [record.loss for record in runs.steps(run)]
    assert list(dict(sorted(worlds["train/loss"].items())).values()) == losses
    (lost,) = (line["last"] for line in lines if line["metric"].endswith("/lost_steps"))
    assert lost == runs.events(run, "recovered")[0]["steps_lost"]
    spent = sum(
        line["sum"]
        for line in lines
        if "/goodput/" in line["metric"] and line["metric"].endswith("_secs")
    )
    times = [event["time"] for event in append_log.read(run / "events.jsonl")]
    # The time before the first event counts, too.
    assert spent >= times[-1] - times[0] - 1
