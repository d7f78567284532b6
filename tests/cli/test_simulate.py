"""`elastic-ckpt simulate`: settings side by side."""

import json

import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.simulation import cluster
from elastic_ckpt.simulation.cluster import Event, EventKind
from tests import json_outputs
from tests.refusals import cli as refusals

_, *CONFIG = refusals.CLUSTER[:4]


def run(*arguments):
    return main.main([*refusals.CLUSTER, *arguments])


def as_json(capsys, *arguments):
    assert run("--json", *arguments) == 0
    output = capsys.readouterr().out
    json_outputs.check("simulate", output)
    return json.loads(output)


@pytest.mark.slow
def test_settings_are_compared_under_the_same_failures(capsys):
    varied = ["--vary", "local_checkpoint_period=5,50", "--vary", "spares=0,2"]
    results = as_json(capsys, *varied)
    assert [each["setting"] for each in results] == [
        {"local_checkpoint_period": period, "spares": spares}
        for period in ("5", "50")
        for spares in ("0", "2")
    ]
    often, _, seldom, _ = results
    assert often["steps_lost"] < seldom["steps_lost"]
    assert often["bytes"]["saved"] > seldom["bytes"]["saved"]
    assert {each["hosts"] for each in results} == {16}
    assert as_json(capsys, *varied) == results
    assert as_json(capsys, *varied, "--seed", "1") != results


def test_table_and_the_page_name_each_setting(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert run("--vary", "peer_copies=0,1", "--output", str(page)) == 0
    table, html = capsys.readouterr().out, page.read_text()
    for name in ("peer_copies=0", "peer_copies=1", "goodput %", "persistent"):
        assert name in table
        assert name in html
    assert html.count("<figure>") == 3


def test_trace_replaces_random_failures_and_runs_until_the_steps_are_done(
    capsys, tmp_path
):
    path = tmp_path / "trace.jsonl"
    events = [Event(time=400.0, what=EventKind.KILL_SLICE, which=1)]
    path.write_bytes(cluster.to_bytes(events))
    arguments = [
        *("simulate", *CONFIG, "steps=100", "--trace", str(path), "--json"),
        *("--state-gib", "1", "--cost", "step_secs=10"),
    ]
    assert main.main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["losses"], result["hosts"]) == (100, 1, 4)
