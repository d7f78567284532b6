"""Which default tests reach which line of the package, and what each test costs."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

DEFAULT = "not slow and not night"


class Reach:
    """What one run of tests under `coverage` has told."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Reads the two files that `record` wrote into `directory`."""
        import coverage

        data = coverage.CoverageData(str(directory / "coverage"))
        data.read()
        root = f"{pathlib.Path.cwd()}/"
        self._lines = {
            path.removeprefix(root): data.contexts_by_lineno(path)
            for path in data.measured_files()
        }
        self.secs: dict[str, float] = json.loads((directory / "secs.json").read_text())

    def paths(self, rooms: Sequence[str]) -> list[str]:
        """The modules in these directories of which a line was executed."""
        return sorted(path for path in self._lines if path.startswith(tuple(rooms)))

    def tests(self, path: str, lines: range, max_secs: float) -> list[str]:
        """The tests that execute one of the lines: the cheapest, for so long."""
        reached = {
            test for line in lines for test in self._lines[path].get(line, ()) if test
        }
        secs = 0.0
        chosen = []
        for test in sorted(reached, key=lambda test: (self.secs[test], test)):
            secs += self.secs[test]
            if chosen and secs > max_secs:
                break
            chosen.append(test)
        return chosen


def record(directory: pathlib.Path, tests: Sequence[str]) -> Reach:
    """Runs the tests once, all in one process."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"ELASTIC_CKPT_REACH": str(directory)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", __name__]
    command += ["-p", "no:cacheprovider", "-m", DEFAULT, *tests]
    subprocess.run(command, env=environment, check=True)
    return Reach(directory)


# What follows is the plugin of that run: it is imported before the package.

_directory = os.environ.get("ELASTIC_CKPT_REACH")
_secs: collections.Counter = collections.Counter()

if _directory:
    import coverage

    _coverage = coverage.Coverage(
        source=["elastic_ckpt", "sidecar"],
        data_file=str(pathlib.Path(_directory) / "coverage"),
        config_file=False,
    )
    _coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """Names the test whose lines follow, and times it."""
        _coverage.switch_context(item.nodeid)
        start = time.process_time()
        yield
        _secs[item.nodeid] = time.process_time() - start
        _coverage.switch_context("")

    def pytest_unconfigure() -> None:
        """Writes what was found."""
        _coverage.stop()
        _coverage.save()
        path = pathlib.Path(_directory) / "secs.json"
        path.write_text(json.dumps(_secs))
