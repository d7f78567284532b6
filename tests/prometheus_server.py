"""A real Prometheus that scrapes processes of this machine."""

import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

_REMEDY = "it is not on the PATH: apt-get install -y --no-install-recommends prometheus"
# Far more than anything that a test waits for takes.
_LIMIT_SECS = 1800


def program(name: str) -> str:
    path = shutil.which(name)
    assert path, f"{name}: {_REMEDY}"
    return path


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    while True:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            first = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = first.getsockname()[1]
            for further in range(1, count):
                address = ("127.0.0.1", port + further)
                opened.enter_context(socket.create_server(address))
            return port


class Server:
    """What a running Prometheus is asked.

    Args:
      port: of its API.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/{path}?{query}") as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        ready = f"{self._url}/-/ready"
        with contextlib.suppress(OSError), urllib.request.urlopen(ready):
            return True
        return False

    def value(self, query: str) -> float:
        """The value of a query now; NaN if it has none."""
        found = self.get("api/v1/query", query=query)["result"]
        return float(found[0]["value"][1]) if found else float("nan")

    def points(
        self, query: str, *, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """The series of a query, each with its labels and `values`."""
        return self.get(
            "api/v1/query_range", query=query, start=start, end=end, step=step
        )["result"]

    def alerts(self) -> list[dict[str, Any]]:
        return self.get("api/v1/alerts")["alerts"]

    def firing(self) -> set[str]:
        return {
            alert["labels"]["alertname"]
            for alert in self.alerts()
            if alert["state"] == "firing"
        }


def until(holds: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + _LIMIT_SECS
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)


@contextlib.contextmanager
def running(
    directory: pathlib.Path, rules: str, jobs: dict[str, Sequence[int]]
) -> Iterator[Server]:
    """Scrapes and evaluates rules every second while the block runs.

    Args:
      directory: of its files, which is made.
      rules: a rule file.
      jobs: by the name of a run, the ports of its processes.
    """
    directory.mkdir()
    (directory / "rules.yml").write_text(rules)
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": name,
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port}" for port in ports]}
                ],
            }
            for name, ports in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    port = free_ports(1)
    with (directory / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        server = Server(port)

        def is_ready() -> bool:
            written = (directory / "log.txt").read_text()
            assert process.poll() is None, written
            return server.is_ready()

        until(is_ready, what="Prometheus is ready")
        yield server
    finally:
        process.terminate()
        process.wait()
