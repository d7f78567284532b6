"""`python -m tests.mutants ROOM`, or `faults`."""

import argparse
import ast
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import random
import select
import signal
import sys
import time
from collections.abc import Sequence

from tests.mutants import faults, mutation, reach

# What is mutated together, and the tests that are there to find it.
ROOMS = {
    "steps": (
        ["elastic_ckpt/steps/", "elastic_ckpt/tiers/", "elastic_ckpt/checkpoint/"],
        ["model", "steps", "tiers", "checkpoint"],
    ),
    "data": (["elastic_ckpt/data/"], ["data", "frontend"]),
    "universal": (["elastic_ckpt/universal/"], ["universal"]),
    "elastic": (
        ["elastic_ckpt/elastic/", "elastic_ckpt/training/"],
        ["elastic", "training", "monitoring", "simulation", "inspect"],
    ),
}
SHARED_TESTS = ["refusals", "own_formats"]

# A mutant that hangs is dead, too: its tests may take so many times `--max-secs`.
PATIENCE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each mutant, and how many died."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__
    )
    parser.add_argument("room", choices=[*ROOMS, "faults"])
    parser.add_argument("--num", type=int, default=90, help="mutants (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--output", type=pathlib.Path, help="a line of JSON for each")
    parser.add_argument(
        "--again", type=pathlib.Path, help="the mutants that died in this --output"
    )
    parser.add_argument("--only", default="", help="mutants with this in their path")
    parser.add_argument(
        "--max-secs", type=float, default=60, help="of tests for each (default: 60)"
    )
    parser.add_argument(
        "--reach",
        type=pathlib.Path,
        help="directory of what the tests reach, used again if it is there",
    )
    options = parser.parse_args(arguments)
    if options.room == "faults":
        return _faults(options)
    reached = _reach(options, options.room)
    if options.again:
        chosen = _those_that_died(options.again)
    else:
        chosen = _random_ones(reached, ROOMS[options.room][0], options)
    chosen = [mutant for mutant in chosen if options.only in mutant.path]
    _import_others()
    died = 0
    for mutant in chosen:
        file = pathlib.Path(mutant.path)
        source = file.read_text() if file.exists() else ""
        tree = mutation.mutated(source, mutant)
        if tree is None:
            outcome = {"gone": True}
        else:
            lines = dict(mutation.mutants(mutant.path, source))[mutant]
            tests = reached.tests(mutant.path, lines, options.max_secs)
            outcome = _run(mutant.path, tree, tests, options.max_secs)
        died += bool(outcome.get("killed_by")) or "gone" in outcome
        _report(options.output, dataclasses.asdict(mutant) | outcome)
    print(f"{died} of {len(chosen)} died")
    return int(options.again is not None and died < len(chosen))


def _reach(options: argparse.Namespace, room: str) -> reach.Reach:
    directory = options.reach or pathlib.Path("runs/mutants") / room
    if (directory / "secs.json").exists() and options.reach:
        return reach.Reach(directory)
    names = [*ROOMS[room][1], *SHARED_TESTS]
    tests = [f"tests/{name}" for name in names if pathlib.Path("tests", name).is_dir()]
    return reach.record(directory, tests)


def _random_ones(
    reached: reach.Reach, rooms: Sequence[str], options: argparse.Namespace
) -> list[mutation.Mutant]:
    """Mutants of lines that a test executes, as many as asked for."""
    places = [
        mutant
        for path in reached.paths(rooms)
        if options.only in path
        for mutant, lines in mutation.mutants(path, pathlib.Path(path).read_text())
        if reached.tests(path, lines, options.max_secs)
    ]
    random.Random(options.seed).shuffle(places)
    return places[: options.num]


def _those_that_died(path: pathlib.Path) -> list[mutation.Mutant]:
    names = [field.name for field in dataclasses.fields(mutation.Mutant)]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        mutation.Mutant(**{name: record[name] for name in names})
        for record in records
        if record.get("killed_by")
    ]


def _faults(options: argparse.Namespace) -> int:
    _import_others()
    survived = 0
    chosen = [fault for fault in faults.FAULTS if options.only in fault.path]
    for fault in chosen:
        tree = ast.parse(fault.applied())
        outcome = _run(fault.path, tree, list(fault.tests), options.max_secs)
        survived += not outcome["killed_by"]
        _report(options.output, {"name": fault.name, "path": fault.path} | outcome)
    print(f"{len(chosen) - survived} of {len(chosen)} died")
    return int(survived > 0)


def _report(path: pathlib.Path | None, record: dict) -> None:
    text = json.dumps(record)
    print(text, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(f"{text}\n")


def _import_others() -> None:
    """Imports what the package imports: forked processes have it already."""
    import grain
    import hypothesis.stateful
    import jax
    import pyarrow
    import tensorstore
    from orbax.checkpoint import v1

    del grain, hypothesis, jax, pyarrow, tensorstore, v1


def _run(path: str, tree: ast.Module, tests: list[str], max_secs: float) -> dict:
    """Runs the tests on the package with this module in place of its own."""
    start = time.monotonic()
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        os.setpgid(0, 0)
        try:
            _run_here(path, tree, tests, writing)
        finally:
            os._exit(os.EX_SOFTWARE)
    os.close(writing)
    # What the tests have started may hold the pipe open for any time.
    ending = os.pidfd_open(process)
    ended, _, _ = select.select([ending], [], [], PATIENCE * max_secs)
    os.close(ending)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    _, status, usage = os.wait4(process, 0)
    killed_by = "" if ended else f"it hung for {PATIENCE * max_secs:g} s"
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError):
        killed_by = os.read(reading, 4096).decode() or killed_by
    os.close(reading)
    if status == os.EX_SOFTWARE << 8:
        raise RuntimeError(f"the tests of {path} could not be started: {tests}")
    if status and not killed_by:
        killed_by = f"it ended with status {status}"
    return {
        "killed_by": killed_by,
        "num_tests": len(tests),
        "cpu_secs": round(usage.ru_utime + usage.ru_stime, 1),
        "secs": round(time.monotonic() - start, 1),
    }


def _run_here(path: str, tree: ast.Module, tests: list[str], pipe: int) -> None:
    import pytest

    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    code = compile(tree, path, "exec")
    sys.meta_path.insert(0, _Finder(name.removeprefix("sidecar."), code))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ["ELASTIC_CKPT_COLD"] = "1"
    command = ["-n", "0", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    command += ["-m", reach.DEFAULT]
    code = pytest.main([*command, *tests], plugins=[_FirstFailure(pipe)])
    os._exit(0 if code == pytest.ExitCode.OK else os.EX_SOFTWARE)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module whose code is another."""

    def __init__(self, name: str, code: object) -> None:
        self._name = name
        self._code = code

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        code = self._code

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname):  # noqa: ARG002
                return code

        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class _FirstFailure:
    """Tells the parent at once, in case that the end hangs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report) -> None:
        self._tell(report)

    def pytest_collectreport(self, report) -> None:
        self._tell(report)

    def _tell(self, report) -> None:
        if report.outcome == "failed":
            os.write(self._pipe, report.nodeid.encode())
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
