"""Conversions of a ZeRO checkpoint, beside DeepSpeed's program for them.

Both sides read the same directory and write DeepSpeed's universal format, as commands
in as many processes: `elastic-ckpt convert --to deepspeed`, and `python -m
deepspeed.checkpoint.ds_to_universal`. Ours also compares checksums, syncs its files
and reads them back; both are timed until the command ends. Files are synced before the
next command starts, and sources are in the page cache.

DeepSpeed needs an environment apart. To measure it, make one and name its interpreter:

    python3.11 -m venv .venv-deepspeed
    .venv-deepspeed/bin/pip install torch==2.13.0 deepspeed==0.19.8
    DEEPSPEED_PYTHON=.venv-deepspeed/bin/python python -m benchmarks universal

On a machine without accelerator, torch is installed from its index for CPUs.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from benchmarks import report
from elastic_ckpt import universal

PYTHON = "DEEPSPEED_PYTHON"

_PROCESSES = (1, 2)
_TAG = "global_step2"
_WRITER = pathlib.Path(__file__).parent / "peers" / "deepspeed_zero.py"
_VERSIONS = (
    "from importlib.metadata import version as of;"
    ' print(f\'deepspeed {of("deepspeed")}, torch {of("torch")}\')'
)
_OURS = "import sys; from elastic_ckpt.cli.main import main; sys.exit(main())"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the checkpoint, and how often it is converted.

    Attributes:
      layers: of 10 matrices of `embed` x `embed` elements, at 14 bytes an element.
      embed: the size of the dim between layers.
      ranks: data-parallel ones, over which states are sharded.
      rounds: that are counted.
    """

    layers: int = 8
    embed: int = 2048
    ranks: int = 4
    rounds: int = 3


SMALL = Size(layers=2, embed=64, rounds=1)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on DeepSpeed; without figures where it is not installed."""
    python = os.environ.get(PYTHON)
    if python is None:
        print(
            f"deepspeed: left out: {PYTHON} does not name the interpreter of an"
            f" environment with it; see {pathlib.Path(__file__).name}"
        )
        return {}
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        source = path / "source" / _TAG
        sizes = (size.layers, size.embed, 2 * size.embed, size.ranks)
        _run([python, str(_WRITER), str(source), *map(str, sizes)])
        secs = {
            processes: _timed(_commands(python, source, processes), size.rounds)
            for processes in _PROCESSES
        }
        gib = sum(file.stat().st_size for file in source.iterdir()) / 2**30
    versions = _run([python, "-c", _VERSIONS]).strip()
    return {
        f"convert_ratio_ds_to_universal_{processes}": report.ratio(
            taken["deepspeed"],
            taken["ours"],
            f"at least 3; ds_to_universal ({versions}), {gib:.2f} GiB,"
            f" processes of each: {processes}",
        )
        for processes, taken in secs.items()
    }


def _timed(
    commands: Mapping[str, tuple[Sequence[str], pathlib.Path]], rounds: int
) -> dict[str, list[float]]:
    secs: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, (command, _) in commands.items():
            os.sync()
            began = time.perf_counter()
            _run(command)
            secs[name].append(time.perf_counter() - began)
        written = [path for _, path in commands.values()]
        if not number:
            _check(*written)
        for path in written:
            shutil.rmtree(path)
    return secs


def _commands(
    python: str, source: pathlib.Path, num_processes: int
) -> Mapping[str, tuple[Sequence[str], pathlib.Path]]:
    # By side: the command, and the directory that it makes.
    path = source.parent.parent
    ours, theirs = path / "ours", path / "deepspeed"
    processes = str(num_processes)
    program = [python, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", str(source), "--output_folder", str(theirs / _TAG)]
    workers = ["--num_extract_workers", processes, "--num_merge_workers", processes]
    convert = [sys.executable, "-c", _OURS, "convert", str(source), str(ours)]
    options = ["--to", "deepspeed", "--processes", processes]
    return {
        "deepspeed": ([*program, *folders, *workers], theirs),
        "ours": ([*convert, *options], ours),
    }


def _run(command: Sequence[str]) -> str:
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | settings
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
    return ended.stdout


def _check(theirs: pathlib.Path, ours: pathlib.Path) -> None:
    # Both have the same states; tests compare values.
    held = [
        {
            (each.name, each.kind, each.shape)
            for each in universal.open_checkpoint(path / _TAG).tensors
        }
        for path in (theirs, ours)
    ]
    assert held[0] == held[1], held[0] ^ held[1]
