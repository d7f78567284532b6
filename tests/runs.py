"""Starts the program as a person does, and reads what it left."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, util

from elastic_ckpt.cli import main
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import configured, launch, schema, step_log

ROOT = pathlib.Path(__file__).parent.parent
# Far more than any run of a test takes.
LIMIT_SECS = 1800


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "elastic_ckpt.cli.main", *map(str, arguments)]


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program in a process forked from this session's warm server.

    The program's own hosts are forked from that server, too: nothing is imported again,
    which is most of the time of a short run.
    """
    return forked(main.main, [str(argument) for argument in arguments])


def forked(
    function: Callable[..., int], *arguments: object, leads_group: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a function in a process forked from this session's warm server.

    Args:
      function: returns the exit code; picklable, as its arguments.
      leads_group: whether the process leads a new group, with all processes that it
        starts.
    """
    with tempfile.TemporaryDirectory() as directory:
        outputs = [pathlib.Path(directory, name) for name in ("stdout", "stderr")]
        process = _start(outputs, leads_group, function, arguments)
        process.join(LIMIT_SECS)
        assert process.exitcode is not None, f"{arguments} did not end"
        stdout, stderr = (output.read_text() for output in outputs)
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


class Started:
    """The program in a process forked from this session's warm server, like a Popen.

    Args:
      arguments: of the program.
      output: a file that all output is added to; None has it read from `stdout`.
      leads_group: whether the process leads a new group, with all processes that it
        starts.
    """

    def __init__(
        self,
        *arguments: object,
        output: pathlib.Path | None = None,
        leads_group: bool = False,
    ) -> None:
        words = ([str(argument) for argument in arguments],)
        reader, writer = multiprocessing.Pipe(duplex=False)
        with reader, writer:
            outputs = [output or writer] * 2
            self._process = _start(outputs, leads_group, main.main, words)
            self.stdout = None
            if output is None:
                self.stdout = open(os.dup(reader.fileno()))  # noqa: SIM115
        self.pid = self._process.pid

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._process.kill()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = LIMIT_SECS) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, "it does not end"
        if self.stdout is not None:
            self.stdout.close()
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()


def _start(outputs, leads_group, function, arguments):
    launch.warm_up()
    server = None if leads_group else forkserver._forkserver._forkserver_address
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(outputs, _environment(), server, function, arguments)
    )
    process.start()
    return process


def _environment() -> dict[str, str]:
    # Without what pytest sets for each test, and readline for the processes it starts.
    changing = ("PYTEST", "COLUMNS", "LINES")
    return {k: v for k, v in os.environ.items() if not k.startswith(changing)}


def _is_running() -> None:
    pass


def _run(outputs, environment, server, function, arguments):
    for descriptor, output in enumerate(outputs, start=1):
        if isinstance(output, pathlib.Path):
            opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        else:
            opened = output.fileno()
        os.dup2(opened, descriptor)
    # Processes that are forked start another server, if nothing is done.
    if environment == _environment():
        if server is None:
            util.spawnv_passfds = functools.partial(_spawn, util.spawnv_passfds)
        else:
            forkserver._forkserver._forkserver_address = server
            forkserver._forkserver.ensure_running = _is_running
            forkserver.ensure_running = _is_running
    if server is None:
        os.setsid()
    # The server has it blocked for its hosts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    raise SystemExit(function(*arguments))


def _spawn(spawn, path, arguments, descriptors):
    # The server of a group is forked from this process, which has imported everything.
    if "multiprocessing.forkserver" not in arguments[-1]:
        return spawn(path, arguments, descriptors)
    server = os.fork()
    if server:
        return server
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (0, 1, 2, *descriptors):
            with contextlib.suppress(OSError):
                os.close(descriptor)
    try:
        forkserver.main(*descriptors, forkserver._forkserver._preload_modules)
    finally:
        os._exit(0)


def verb(*arguments: object, code: int = 0) -> str:
    """Runs a verb in this process, which must return `code`; returns its output.

    With `--json`, the output must have the fields that the verb promises.
    """
    printed, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        returned = main.main([str(argument) for argument in arguments])
    output = printed.getvalue() + complained.getvalue()
    assert returned == code, output
    if "--json" in arguments and printed.getvalue():
        # What it imports takes seconds, which hosts of other tests do not need.
        from tests import json_outputs

        json_outputs.check(str(arguments[0]), printed.getvalue())
    return output


def write_config(
    directory: pathlib.Path, corpus: str, **settings: object
) -> pathlib.Path:
    """A configuration of a tiny model on `corpus`, whose runs are in `directory`."""
    values = {
        "run_name": "tiny",
        "base_output_directory": str(directory),
        "grain_train_files": corpus,
        "max_target_length": 16,
        "global_batch_size": 8,
        "base_emb_dim": 16,
        "base_num_query_heads": 2,
        "head_dim": 8,
        "base_mlp_dim": 32,
        "base_num_decoder_layers": 1,
        "learning_rate": 0.01,
        "learning_rate_schedule_steps": 100,
        "colocated_python_data_input": True,
        "checkpoint_period": 4,
        "steps": 12,
        "log_period": 4,
        **settings,
    }
    path = directory / "config.yml"
    # JSON is YAML.
    path.write_text(json.dumps(values, indent=1))
    return path


def write_record(directory: os.PathLike | str, config: schema.Config) -> None:
    """Records a start of the configured run in `directory`, wherever that is."""
    steps = f"{directory}/checkpoints"
    *_, persistent = configured.tiers(config, persistent=steps)
    record = {"every": persistent.every, **configured.record(config)}
    run_files.write(directory, run_files.RunRecord(steps_directory=steps, **record))


def steps(run: pathlib.Path) -> list[step_log.StepRecord]:
    """The steps that count, in order."""
    lineage = step_log.lineage(step_log.read(run))
    return [lineage[step] for step in sorted(lineage)]


def saved_steps(run: pathlib.Path) -> list[int]:
    return sorted(
        int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()
    )


def events(run: pathlib.Path, name: str) -> list[dict]:
    # The last line may be one that is being written.
    *lines, _ = (run / "events.jsonl").read_text().split("\n")
    return [event for event in map(json.loads, lines) if event["event"] == name]
