"""`elastic-ckpt simulate`: a run and its alternatives side by side."""

import json

from elastic_ckpt.cli import main
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import load
from tests import json_outputs, runs
from tests.refusals import cli as refusals

_, CONFIG, *_ = refusals.CLUSTER


def as_json(capsys, *arguments):
    assert main.main([*refusals.CLUSTER, "--json", *arguments]) == 0
    output = capsys.readouterr().out
    json_outputs.check("simulate", output)
    return {each["setting"]: each for each in json.loads(output)}


def test_alternatives_are_compared_under_the_same_failures(capsys):
    results = as_json(capsys)
    often, seldom = results["a save every 2 steps"], results["a save every 10 steps"]
    assert often["steps_lost"] < seldom["steps_lost"]
    assert often["secs"]["save"] > seldom["secs"]["save"]
    spared = results["one more spare"]
    assert spared["losses"] <= results["as configured"]["losses"]
    assert as_json(capsys) == results
    assert as_json(capsys, "--seed", "1") != results
    # The table has the same numbers.
    assert main.main(refusals.CLUSTER) == 0
    table = capsys.readouterr().out
    for name, result in results.items():
        assert name in table
        assert f"{result['goodput_percent']:.2f}" in table


def test_failures_of_a_run_are_repeated_until_the_steps_are_done(capsys, tmp_path):
    config = runs.write_config(tmp_path, "texts")
    runs.write_record(tmp_path, load.load(config))
    began = {
        "time": 7.0,
        "event": "world_started",
        "slices": [0, 1, 2, 3],
        "spares": [],
    }
    lost = {"time": 407.0, "event": "slice_lost", "slice": 1, "why": "gone"}
    lines = "".join(json.dumps(event) + "\n" for event in (began, lost))
    (tmp_path / run_files.EVENTS).write_text(lines)
    arguments = [
        *("simulate", CONFIG, "steps=100", "--trace", str(tmp_path), "--json"),
        *("--state-gib", "1", "--cost", "step_secs=10"),
    ]
    assert main.main(arguments) == 0
    result, *_ = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["losses"]) == (100, 1)
