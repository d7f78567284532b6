"""A share of the night tests, chosen by the commit: `pytest -n 2 -m night -p night`.

`night.json` has the seconds that each takes, alone, on the idle machine that the goals
of `.ci/run` are for. By these they are divided into shares for two workers and ten
minutes. The number of the commit chooses the share, and the test that it begins with,
so that landings run all of them in turn. By the clock, no test begins after ten
minutes, and each says so; one that has begun runs to its end, so none may take longer
than a share.

`pytest -n 0 -m night -p night --record-night` runs all that is selected, and writes
their seconds into the table. PYTHONPATH has to name this directory.
"""

import collections
import json
import math
import pathlib
import subprocess
import time

import pytest

TABLE = pathlib.Path(__file__).with_name("night.json")
SHARE_SECS = 600
# What the table says for a share, for both workers: the rest is for a slower machine.
PLANNED_SECS = 720
# A test that the table does not have yet.
NEW_SECS = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that records instead of choosing."""
    parser.addoption("--record-night", action="store_true", help="write night.json")


def function(nodeid: str) -> str:
    """The test with all of its parameters: what the table has the mean of."""
    return nodeid.partition("[")[0]


def shares(nodes: list[str], secs: dict[str, float]) -> list[list[str]]:
    """Divides tests, in order; those of a file stay together if a share holds them.

    They share what is set up for their file.
    """

    def total(some: list[str]) -> float:
        return sum(secs.get(function(node), NEW_SECS) for node in some)

    files = collections.defaultdict(list)
    for node in nodes:
        files[node.partition("::")[0]].append(node)
    units = []
    for file in files.values():
        whole = total(file) <= PLANNED_SECS
        units += [file] if whole else [[node] for node in file]
    found: list[list[str]] = []
    # The longest first: what is short fills the room that they leave.
    for unit in sorted(units, key=total, reverse=True):
        room = (each for each in found if total(each + unit) <= PLANNED_SECS)
        share = next(room, None)
        if share is None:
            found.append(share := [])
        share += unit
    return found


def number() -> int:
    """The number of the commit, or in a shallow clone, which has none, its name."""

    def git(*words: str) -> str:
        command = ["git", "-C", TABLE.parent, *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD"), 16)
    return int(git("rev-list", "--count", "HEAD"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves the share of the commit, from another test on each time it comes."""
    if config.option.record_night:
        config.pluginmanager.register(Recorder())
        return
    by_node = {item.nodeid: item for item in items}
    divided = shares([*by_node], json.loads(TABLE.read_text()))
    turn, place = divmod(number(), len(divided))
    share = sorted(divided[place], key=[*by_node].index)
    first = turn % len(share)
    items[:] = [by_node.pop(node) for node in share[first:] + share[:first]]
    config.hook.pytest_deselected(items=list(by_node.values()))
    config.pluginmanager.register(Clock())


class Clock:
    """Lets no test begin after the end of the share."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SHARE_SECS

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Leaves the test to another landing."""
        if time.monotonic() > self._end:
            pytest.skip(f"{SHARE_SECS} seconds of the night are over")


class Recorder:
    """Writes the mean seconds of each test into the table."""

    def __init__(self) -> None:
        self._secs = collections.defaultdict(lambda: collections.defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the setup, the call or the teardown of a test."""
        self._secs[function(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the table after each run: others of its tests keep their seconds."""
        table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        for name, nodes in self._secs.items():
            table[name] = math.ceil(10 * sum(nodes.values()) / len(nodes)) / 10
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
