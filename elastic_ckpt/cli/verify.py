"""`elastic-ckpt verify PATH...`: reads every copy of every part and compares digests.

The run may continue during verification. Steps that it removes then count as missing,
so specify the newest step with --step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from elastic_ckpt.cli import option_numbers, progress_line, shared
from elastic_ckpt.core import errors
from elastic_ckpt.inspect import tier_locations, verification

# The maximum number of problems printed; the JSON has all.
_SHOWN = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    shared.add_locations(parser)
    parser.add_argument(
        "--step",
        type=option_numbers.count,
        help="the step to verify; by default all",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also fail for steps that stock Orbax saved, which have no digests",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Verifies the steps; returns 1 if anything is wrong."""
    paths, secret_file = arguments.paths, arguments.secret_file
    with tier_locations.opened(paths, secret_file=secret_file) as (name, tiers):
        known = tiers.known
        steps = known if arguments.step is None else [arguments.step]
        if not known or not set(steps) <= set(known):
            _, problems = tiers.look(steps[0] if steps else 0)
            raise errors.CheckpointError(
                "the steps to verify are not in these locations, which contain steps"
                f" {'; '.join([str(known), *problems])}"
            )
        progress = progress_line.ProgressLine("read")
        result = verification.verify(tiers, steps, progress=progress)
        progress.end()
    passed = result.passed(strict=arguments.strict)
    content = {"run": name, "passed": passed, **dataclasses.asdict(result)}
    print(
        json.dumps(content, indent=2)
        if arguments.json
        else describe(result, passed=passed)
    )
    return 0 if passed else 1


def describe(result: verification.Verification, *, passed: bool) -> str:
    """The result as text."""
    lines = []
    for each in result.steps:
        read = f", {each.num_copies:,} copies, {each.num_bytes:,} bytes"
        lines.append(f"step {each.step}: {each.state}{read if each.num_copies else ''}")
    lines += [f"  {each}" for each in result.problems[:_SHOWN]]
    if more := result.problems[_SHOWN:]:
        lines.append(f"  and {len(more):,} more; --json lists all")
    outcome = "PASSED: every copy matches what was saved"
    if result.problems:
        outcome = "PASSED, except for what cannot be verified" if passed else "FAILED"
    return "\n".join([*lines, outcome])
