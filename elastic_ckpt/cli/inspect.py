"""`elastic-ckpt inspect PATH...`: the steps of a run, and in which tiers they are.

For the directory of a run of `elastic-ckpt train` or `maxtext` it shows arrays and data
state; for RAM disks, persistent steps and peers the steps, their holders, and what the
loss of a host or slice would take; for a run whose steps are in tiers both. It shows
the newest step briefly, with --step one step with all of its arrays, with --all every
step. The JSON has all steps unless --step names one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

from elastic_ckpt.application import run_directory
from elastic_ckpt.cli import locations, tier_report
from elastic_ckpt.config import keys
from elastic_ckpt.core import errors, option_numbers, storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    locations.add_arguments(parser)
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        metavar="KIND",
        help="show the loss of another kind of failure domain too, such as rack or"
        " zone",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step",
        type=option_numbers.count,
        help="show this step, and all of its arrays",
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="show every step; by default only the newest",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the run."""
    from elastic_ckpt.inspect import survey

    content: dict[str, Any] = {}
    lines: list[str] = []
    is_run = len(arguments.paths) == 1 and locations.is_run(arguments.paths[0])
    is_brief = arguments.step is None and not arguments.all
    newest_only = is_brief and not arguments.json
    if is_run:
        content = collect(
            arguments.paths[0], step=arguments.step, newest_only=newest_only
        )
        lines.append(describe(content, is_brief=is_brief))
    with locations.opened(arguments) as (name, tiers):
        # Without manifests there are no tiers.
        if arguments.peer or tiers.steps or not is_run:
            domains = ["host", "slice", *arguments.domain]
            report = survey.survey(
                tiers, domains, step=arguments.step, newest_only=newest_only
            )
            if not report.steps:
                tiers.check_versions()
            if not (report.known or report.leftovers or report.problems or is_run):
                raise errors.RunError(
                    f"{', '.join([*arguments.paths, *arguments.peer])}: this is"
                    " neither the directory of a run (it contains no"
                    f" {run_directory.CONFIG}) nor one with steps of any tier; give"
                    " base_output_directory/run_name, or the directory with the steps"
                )
            content["tiers"] = {"run": name, **dataclasses.asdict(report)}
            lines.append(tier_report.describe(name, report))
    _check_step(arguments.step, content)
    print(json.dumps(content, indent=2) if arguments.json else "\n".join(lines))
    return 0


def collect(
    directory: str, *, step: int | None = None, newest_only: bool = False
) -> dict[str, Any]:
    """The steps in storage as `inspect` shows them, as JSON.

    Args:
      directory: of the run.
      step: the only one to show, if it exists; None for all.
      newest_only: whether to show only the newest.

    Raises:
      RunError: if there is no run in `directory`.
    """
    from elastic_ckpt.checkpoint import summary
    from elastic_ckpt.core import digest
    from elastic_ckpt.tiers.persistent import persistent_root

    own = run_directory.read_loop(directory)
    values = (
        dataclasses.asdict(own)
        if own is not None
        else keys.values(run_directory.read_config(directory))
    )
    checkpoints = run_directory.saved_steps_of(directory)
    interrupted = persistent_root.PersistentRoot.from_path(checkpoints).leftovers()
    complete = summary.steps(checkpoints)
    shown = [each for each in complete if step in (None, each)]
    if newest_only:
        shown = shown[-1:]
    return {
        "run": directory,
        "config": digest.json_digest(values),
        "known": list(complete),
        "steps": [_step(each, str(complete[each])) for each in shown],
        "interrupted": [
            {"step": each.step, "path": str(each.path)} for each in interrupted
        ],
    }


def _check_step(step: int | None, content: dict[str, Any]) -> None:
    known = {*content.get("known", ()), *content.get("tiers", {}).get("known", ())}
    if step is not None and step not in known:
        raise errors.CheckpointError(
            f"there is no step {step} in the given places; they contain the steps"
            f" {sorted(known)}"
        )


def describe(content: dict[str, Any], *, is_brief: bool = False) -> str:
    """The content of `collect` as text.

    Args:
      content: that `collect` returned.
      is_brief: whether arrays are counted rather than listed.
    """
    known = tier_report.numbered(content["known"], "in storage")
    lines = [
        f"{content['run']}: {known}",
        f"configuration: digest {content['config'][:12]}",
    ]
    before: dict[str, Any] = {}
    for step in content["steps"]:
        lines.append(
            f"step {step['step']}: {len(step['state']):,} arrays,"
            f" {step['num_bytes']:,} bytes"
        )
        if is_brief:
            lines += _data_lines(step["data"], is_brief=True)
            continue
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


def _data_lines(data: dict[str, Any], *, is_brief: bool = False) -> list[str]:
    if "error" in data:
        return [f"  data: {data['error']}"]
    datasets = data["pipeline"].get("datasets", {})
    stage = data["pipeline"].get("stage")
    where = ""
    if stage is not None:
        number, begins = stage["number"], stage["begin_steps"]
        where = f", stage {number + 1} of {len(begins)}, from step {begins[number]}"
    position = json.dumps(data["position"])
    lines = [f"  data: {data['engine']}, position {position}{where}"]
    for key, value in data["pipeline"].items():
        if key not in ("datasets", "stage") and not is_brief:
            lines.append(f"    {key}: {json.dumps(value)}")
    weights = sum(dataset["weight"] for dataset in datasets.values()) or 1
    taken = sum(data["taken"].values()) or 1
    for name, dataset in datasets.items():
        achieved = ""
        if name in data["taken"]:
            number = data["taken"][name]
            achieved = f", {number:,} documents taken so far, {number / taken:.2%}"
        lines.append(
            f"    dataset {name}: weight {dataset['weight'] / weights:.2%}{achieved},"
            f" {len(dataset['files'])} files"
        )
    if data["skipped"]:
        lines.append(f"    corrupt records skipped: {data['skipped']:,}")
    return lines


def data_of(path: str) -> dict[str, Any]:
    """The data state of the step at `path`, as JSON; `error` if it cannot be read."""
    from elastic_ckpt.data import cursors, mixing, records, state

    try:
        directory = os.path.join(path, _parts_of(path)[1])
        saved = state.read(directory)
        num_shards: Any = saved.pipeline.get("num_logical_shards", 0)
        shards = cursors.read(directory, range(num_shards), saved.position)
        return {
            **dataclasses.asdict(saved),
            "pipeline": saved.pipeline_now,
            "taken": mixing.taken(shards.values()),
            "skipped": records.skipped(shards.values()),
        }
    except errors.DataError as error:
        # Shown too, although no run can continue from it.
        return {"error": str(error)}


def _parts_of(path: str) -> tuple[str, str]:
    # The names of the train state and the data state of the step at `path`.
    from elastic_ckpt.checkpoint import run_saver
    from elastic_ckpt.integrations import maxtext_seam

    ours = run_saver.STATE, run_saver.DATA
    theirs = maxtext_seam.ITEMS, maxtext_seam.ITERATOR
    is_theirs = (storage.absolute(path) / maxtext_seam.ITEMS).exists()
    return theirs if is_theirs else ours


def _step(step: int, path: str) -> dict[str, Any]:
    from elastic_ckpt.checkpoint import summary

    leaves = summary.arrays(path, _parts_of(path)[0])
    return {
        "step": step,
        "num_bytes": sum(leaf.num_bytes for leaf in leaves),
        "state": [dataclasses.asdict(leaf) for leaf in leaves],
        "data": data_of(path),
    }
