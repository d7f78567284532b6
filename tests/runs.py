"""Starts the program as a person does, and reads what it left."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys

from elastic_ckpt.cli import main
from elastic_ckpt.training import step_log

ROOT = pathlib.Path(__file__).parent.parent


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "elastic_ckpt.cli.main", *map(str, arguments)]


def cli(*arguments: object, cwd=ROOT, timeout_secs=1800) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_secs,
        check=False,
    )


def verb(*arguments: object, code: int = 0) -> str:
    """Runs a verb in this process, which must return `code`; returns its output."""
    printed, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        returned = main.main([str(argument) for argument in arguments])
    output = printed.getvalue() + complained.getvalue()
    assert returned == code, output
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
        # The same few programs are compiled once for all tests.
        "jax_cache_dir": str(pathlib.Path(corpus).parent / "jax_cache"),
        "checkpoint_period": 4,
        "steps": 12,
        "log_period": 4,
        **settings,
    }
    path = directory / "config.yml"
    # JSON is YAML.
    path.write_text(json.dumps(values, indent=1))
    return path


def steps(run: pathlib.Path) -> list[step_log.StepRecord]:
    """The steps that count, in order."""
    lineage = step_log.lineage(step_log.read(run))
    return [lineage[step] for step in sorted(lineage)]


def saved_steps(run: pathlib.Path) -> list[int]:
    return sorted(
        int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()
    )


def events(run: pathlib.Path, name: str) -> list[dict]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
