"""Fixtures for every test, and the check that none leaves anything behind."""

import collections
import difflib
import functools
import gc
import os
import pathlib
import runpy
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable

import grain
import hypothesis
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from elastic_ckpt.core import metrics
from elastic_ckpt.data import positional_data, tokens
from elastic_ckpt.monitoring import summaries
from elastic_ckpt.training import launch
from tests import corpora, shared_memory

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# A shell that starts the tests in the background has them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = f"{shared_memory.SESSION}={os.getpid()}"
# Processes that tests start are known by their environment, and what they make in
# /dev/shm by its name.
SITE = pathlib.Path(__file__).parent / "site"
os.environ[shared_memory.SESSION] = str(os.getpid())
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
)
runpy.run_path(str(SITE / "sitecustomize.py"))

# Containers often have Python write no bytecode. Each of the processes that tests start
# would compile all that it imports, for five seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Compiling is half of the time of the tests, and what is compiled runs for moments. The
# processes that tests start inherit it. (The older of two code generators takes a third
# of the time; the JAX of Python 3.12 has it no more, tests/site/sitecustomize.py.)
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if sys.version_info < (3, 12):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

# `.ci/run` and the default suite search the same examples each time and do not shrink
# what they find: a change fails by what it does alone, and at once. A release searches
# at random (`--hypothesis-profile night`).
_untimed = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "ci",
    _untimed,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    print_blob=True,
)
hypothesis.settings.register_profile("night", _untimed, max_examples=300)
hypothesis.settings.load_profile("ci")

# The rooms of tests that start hosts.
STARTS_HOSTS = ("elastic", "processes")

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew"
    )


# What the default tests of a room may cost, in processor seconds of a quiet machine,
# ended children included. The dearest rooms begin first: the cores end together.
BUDGETS = {
    "checkpoint": 58,
    "data": 48,
    "model": 27,
    "training": 25,
    "universal": 24,
    "core": 9,
    "sidecar": 8,
    "processes": 7,
}
ORDINARY_BUDGET = 6


def _room(path: pathlib.Path) -> str:
    return path.relative_to(ROOT / "tests").parts[0]


def pytest_collection_modifyitems(items):
    """Has the files that take longest begin first."""
    items.sort(key=lambda item: -BUDGETS.get(_room(item.path), 0))


# Programs that no Python package has, and the Debian packages that do.
PROGRAMS = {"kubectl": "kubernetes-client", "promtool": "prometheus"}


def pytest_runtest_setup(item):
    """Fails a test at once that needs a program which is not there."""
    for program in (mark.args[0] for mark in item.iter_markers("needs")):
        if shutil.which(program) is None:
            command = f"apt-get install -y {PROGRAMS[program]}"
            pytest.fail(f"no {program}, which this test needs: {command}", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Notes what a test costs, with the fixtures that it is the first to use."""
    before = os.times()
    try:
        return (yield)
    finally:
        _costs[_room(item.path)] += sum(os.times()[:4]) - sum(before[:4])


_costs = collections.Counter()


def pytest_sessionfinish(session):
    """Sends the costs to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = dict(_costs)


def pytest_testnodedown(node):
    """Takes the costs of a worker."""
    _costs.update(getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(terminalreporter, config):
    """Names the rooms whose default tests cost too much; it fails nothing."""
    if config.option.markexpr != "not slow and not night":
        return
    budgets = {room: BUDGETS.get(room, ORDINARY_BUDGET) for room in _costs}
    # On a slow machine all rooms cost more, though not all equally so.
    pace = max(1, _costs.total() / max(1, sum(budgets.values())))
    for room, secs in _costs.most_common():
        if secs > (budget := 2 * pace * budgets[room]):
            terminalreporter.write_line(
                f"tests/{room} took {secs:.0f} processor seconds, not {budget:.0f}"
            )


def pytest_collection_finish():
    """Keeps what is imported by now out of garbage collections, which take as long."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request):
    """Compares a text with a file in tests/golden, or writes it (--update-golden)."""

    def compare(name: str | pathlib.Path, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        before = path.read_text() if path.exists() else ""
        if text != before:
            changes = difflib.unified_diff(
                before.splitlines(), text.splitlines(), "before", "now", "", "", 0, ""
            )
            command = "uv run --group dev pytest -n 0 -m '' --update-golden"
            pytest.fail(
                f"{path.relative_to(ROOT)} differs from the code:\n"
                + "\n".join(changes)
                + "\nif that is meant, commit what this writes:\n"
                f"{command} {shlex.quote(request.node.nodeid)}",
                pytrace=False,
            )

    return compare


@pytest.fixture(scope="session", autouse=True)
def shared_jax_cache(tmp_path_factory):
    """All processes of the session share what they compile.

    `.ci/run` has one directory for all of its sessions.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    shared = str(directory / "jax_cache")
    directory = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", shared)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True, scope="module")
def warm_fork_server(request):
    """Forks the hosts of a room that starts many from a server with all imports."""
    if request.path.parent.name in STARTS_HOSTS:
        launch.warm_up()


@pytest.fixture
def without_jax_cache():
    """This process compiles all that it runs: programs of JAX's cache are not kept."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """An ArrayRecord file of 100 texts, the n-th being `text n ...`."""
    path = tmp_path_factory.mktemp("corpus") / "texts.array_record"
    return corpora.write_texts(path, num_texts=100)


@pytest.fixture
def data(corpus) -> positional_data.PositionalData:
    """See `data_of`."""
    return data_of(corpus)


def data_of(
    corpus: str, *, length: int = 16, seed: int = 7, num_threads: int = 0
) -> positional_data.PositionalData:
    """The corpus as positional data: shuffled examples of `length` tokens."""
    texts = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(corpus))
    return positional_data.positional(
        texts.seed(seed).shuffle().map(functools.partial(_example, length)).repeat(),
        pipeline={"length": length, "seed": seed},
        read_options=grain.ReadOptions(
            num_threads=num_threads, prefetch_buffer_size=4 * bool(num_threads)
        ),
    )


def _example(length: int, text: bytes) -> dict[str, np.ndarray]:
    found = tokens.of_bytes(text.ljust(length + 1)[: length + 1])
    return {"inputs": found[:-1], "targets": found[1:]}


@pytest.fixture(scope="session")
def object_stores():
    """The environment of clients of object stores that run as long as the tests."""
    from tests import buckets

    with buckets.serving() as environment:
        yield environment


@pytest.fixture
def steps_in(request, monkeypatch, tmp_path):
    """Gives a directory of steps on a disk, `local`, or in a bucket, `gs` or `s3`."""

    def steps(place):
        if place == "local":
            return str(tmp_path / "steps")
        for name, value in request.getfixturevalue("object_stores").items():
            monkeypatch.setenv(name, value)
        return f"{place}://bucket/{tmp_path.name}"

    return steps


@pytest.fixture(params=["gs", "s3"])
def bucket(request, object_stores, monkeypatch, tmp_path):
    """A url that is this test's own, in each kind of object store."""
    for name, value in object_stores.items():
        monkeypatch.setenv(name, value)
    return f"{request.param}://bucket/{tmp_path.name}"


@pytest.fixture
def recorded():
    """Records the values of each metric, in order, while the test runs."""
    values: dict[metrics.Metric, list[float]] = {}
    with summaries.subscribed(
        lambda metric, value: values.setdefault(metric, []).append(value)
    ):
        yield values


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing_behind():
    """Fails the last test of a file whose tests leave a process, or one in /dev/shm."""
    yield
    # Semaphores of a pool that has failed end with the cycles of its error.
    gc.collect()
    # What is left are modules and caches: later collections need not look at them.
    gc.freeze()
    assert not _rest(_descendants), "processes left behind"
    # Files of killed processes are removed a little later.
    assert not _rest(shared_memory.left_behind), "left behind in /dev/shm"


def _rest(look: Callable[[], list[str]]) -> list[str]:
    # Waits for the removal, long enough for a slow machine too.
    deadline = time.monotonic() + 120
    while (rest := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return rest


def _descendants() -> list[str]:
    """Live processes that stem from this session, orphans too, by their environment."""
    processes = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        # This process's own fork server stays warm from test to test.
        own_server = parent == os.getpid() and "multiprocessing" in command
        if MARK.encode() in environment and command and not own_server:
            processes.append(f"{entry.name}: {command[:120]}")
    return processes
