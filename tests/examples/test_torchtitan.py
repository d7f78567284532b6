"""torchtitan itself, from its index and unchanged, trains on other numbers of ranks."""

import email
import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

from elastic_ckpt import data as ec_data
from tests import runs

# 0.3 calls `torch.distributed.set_timeout`, which PyTorch 2.13 does not have.
# It imports triton, which the PyTorch for CPUs does not bring.
REQUIREMENTS = (
    "torch==2.13.0",
    "torchdata==0.11.0",
    "torchtitan==0.2.2",
    "triton==3.9.0",
)
SIZE, LENGTH = 12, 64
KEYS = {
    "grain_file_type": "jsonl",
    "num_logical_shards": 48,
    "grain_shuffle_buffer_size": 8,
    "use_truncation": False,
    "packing": True,
    "grain_packing_type": "first_fit",
}


@pytest.fixture(scope="module")
def python_with_torchtitan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("torchtitan")
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    options = ("--quiet", "--no-compile")
    install = [python, "-m", "pip", "install", *options, *REQUIREMENTS]
    subprocess.run(install, check=True, timeout=1800)
    return python


def train(python, directory, *, num_ranks, num_workers, steps):
    """Trains up to a step, from the newest checkpoint; saves one at the end."""
    places = [
        str(runs.ROOT),
        str(runs.ROOT / "examples"),
        sysconfig.get_path("purelib"),
    ]
    ours = os.pathsep.join(places)
    keys = {
        "model.name": "elastic",
        "model.flavor": "small",
        "job.dump_folder": directory / "run",
        "training.seq_len": LENGTH,
        "training.local_batch_size": SIZE // num_ranks,
        "training.steps": steps,
        "training.mixed_precision_param": "float32",
        "training.dataset_path": directory / "data.yml",
        "training.dataloader.num_workers": num_workers,
        "checkpoint.interval": 2,
        "metrics.log_freq": 1,
    }
    ended = subprocess.run(
        [
            python,
            *("-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *("-m", "tests.examples.titan_run"),
            *(f"--{key}={value}" for key, value in keys.items()),
            *("--checkpoint.enable", "--checkpoint.no-last-save-model-only"),
        ],
        cwd=runs.ROOT,
        env=os.environ
        | {"PYTHONPATH": ours, "ROWS": str(directory), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=runs.LIMIT_SECS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def rows_of(directory, num_ranks):
    """The inputs and labels of each global batch that a world was given."""
    texts = [
        (directory / f"{num_ranks}-{rank}.jsonl").read_text()
        for rank in range(num_ranks)
    ]
    by_rank = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return [
        [
            row
            for batch in ranks
            for row in zip(batch["input"], batch["labels"], strict=True)
        ]
        for ranks in zip(*by_rank, strict=True)
    ]


@pytest.mark.night
def test_torchtitan_trains_on_four_three_and_two_ranks_with_the_rows_of_one(
    python_with_torchtitan, tmp_path
):
    modules = sorted(pathlib.Path(email.__file__).parent.rglob("*.py"))
    texts = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": module.read_text()}) for module in modules]
    texts.write_text("\n".join(lines * 20))
    keys = KEYS | {"grain_train_files": str(texts)}
    (tmp_path / "data.yml").write_text(json.dumps(keys))
    worlds = ((4, 2, 4), (3, 4, 7), (2, 0, 9))
    for num_ranks, num_workers, steps in worlds:
        train(
            python_with_torchtitan,
            tmp_path,
            num_ranks=num_ranks,
            num_workers=num_workers,
            steps=steps,
        )
        assert (tmp_path / "run" / "checkpoint" / f"step-{steps}").is_dir()
    seen = [batch for world in worlds for batch in rows_of(tmp_path, world[0])]
    assert len(seen) == 9

    data = ec_data.from_config(keys, max_target_length=LENGTH)
    one = ec_data.LocalBatches(data, global_batch_size=SIZE)
    for batch in seen:
        expected = next(one)
        labels = expected["targets"].astype("int64")
        labels[expected["targets_segmentation"] == 0] = -100
        whole = zip(expected["inputs"].tolist(), labels.tolist(), strict=True)
        assert batch == list(whole)
    one.close()
