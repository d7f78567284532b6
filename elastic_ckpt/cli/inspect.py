"""`elastic-ckpt inspect PATH...`: the steps of a run, and in which tiers they are.

Of the directory of a run of `elastic-ckpt train` it shows arrays and data state. Of RAM
disks, persistent steps and peers it shows the steps, their holders, and what would be
lost with a host or slice. Of a run whose steps are in tiers it shows both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

from elastic_ckpt.cli import run_directory, tier_report, where
from elastic_ckpt.core import errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    where.add_arguments(parser)
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        metavar="KIND",
        help="another kind of failure domain than host and slice: rack, zone",
    )
    parser.add_argument(
        "--step",
        type=int,
        help="the step whose losses are shown; without it, the newest complete one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the run."""
    from elastic_ckpt.tiers import survey

    content: dict[str, Any] = {}
    lines: list[str] = []
    is_run = len(arguments.paths) == 1 and where.is_run(arguments.paths[0])
    if is_run:
        content = collect(arguments.paths[0])
        lines.append(describe(content))
    with where.opened(arguments) as (name, places):
        # Without manifests there are no tiers.
        if arguments.peer or places.steps or not is_run:
            domains = ["host", "slice", *arguments.domain]
            found = survey.survey(places, domains, step=arguments.step)
            if not (found.steps or found.leftovers or found.problems or is_run):
                raise errors.RunError(
                    f"{', '.join([*arguments.paths, *arguments.peer])}: neither a run"
                    f" (no {run_directory.CONFIG} in it) nor steps in any tier; name"
                    " base_output_directory/run_name, or where the steps are"
                )
            content["tiers"] = {"run": name, **dataclasses.asdict(found)}
            lines.append(tier_report.describe(name, found))
    print(json.dumps(content, indent=2) if arguments.json else "\n".join(lines))
    return 0


def collect(directory: str) -> dict[str, Any]:
    """Everything that `inspect` shows, as JSON.

    Raises:
      RunError: if there is no run in `directory`.
    """
    from elastic_ckpt.checkpoint import checkpointer, summary

    run_directory.read_config(directory)
    checkpoints = os.path.join(directory, checkpointer.DIRECTORY)
    interrupted = checkpointer.interrupted_steps(checkpoints)
    return {
        "run": directory,
        "steps": [
            _step(step, str(path)) for step, path in summary.steps(checkpoints).items()
        ],
        "interrupted": [dataclasses.asdict(step) for step in interrupted],
    }


def describe(content: dict[str, Any]) -> str:
    """What `collect` found, in words."""
    lines = [f"{content['run']}: {len(content['steps'])} complete steps"]
    before: dict[str, Any] = {}
    for step in content["steps"]:
        lines.append(f"step {step['step']}: {step['num_bytes']:,} bytes of arrays")
        if step["state"] == before.get("state"):
            lines.append(f"  state: as in step {before['step']}")
        else:
            lines += [
                f"  {leaf['path']:<40} {leaf['dtype']}{list(leaf['shape'])}"
                f"  {leaf['num_bytes']:,} bytes  {leaf['sharding']}"
                for leaf in step["state"]
            ]
        lines += _data_lines(step["data"])
        before = step
    lines += [
        f"step {step['step']} was interrupted while it was saved: {step['path']}"
        for step in content["interrupted"]
    ]
    return "\n".join(lines)


def _data_lines(data: dict[str, Any]) -> list[str]:
    if "error" in data:
        return [f"  data: {data['error']}"]
    datasets = data["pipeline"].get("datasets", {})
    lines = [f"  data: {data['engine']}, position {json.dumps(data['position'])}"]
    for key, value in data["pipeline"].items():
        if key != "datasets":
            lines.append(f"    {key}: {json.dumps(value)}")
    weights = sum(of["weight"] for of in datasets.values()) or 1
    taken = sum(data["taken"].values()) or 1
    for name, of in datasets.items():
        achieved = ""
        if name in data["taken"]:
            share = data["taken"][name] / taken
            achieved = f", {share:.2%} of {taken:,} documents taken"
        lines.append(
            f"    dataset {name}: weight {of['weight'] / weights:.2%}{achieved},"
            f" {len(of['files'])} files"
        )
    if data["skipped"]:
        lines.append(f"    corrupt records skipped: {data['skipped']:,}")
    return lines


def _step(step: int, path: str) -> dict[str, Any]:
    from elastic_ckpt.checkpoint import checkpointer, summary
    from elastic_ckpt.data import cursors, mixing, records, state

    leaves = summary.arrays(path, checkpointer.STATE)
    try:
        directory = os.path.join(path, checkpointer.DATA)
        saved = state.read(directory)
        num_shards: Any = saved.pipeline.get("num_logical_shards", 0)
        found = cursors.read(directory, range(num_shards), saved.position)
        data: dict[str, Any] = {
            **dataclasses.asdict(saved),
            "taken": mixing.taken(found.values()),
            "skipped": records.skipped(found.values()),
        }
    except errors.DataError as error:
        # A step that cannot be continued from is still worth looking at.
        data = {"error": str(error)}
    return {
        "step": step,
        "num_bytes": sum(leaf.num_bytes for leaf in leaves),
        "state": [dataclasses.asdict(leaf) for leaf in leaves],
        "data": data,
    }
