"""Files of samples that are damaged are read, or are one line with the path.

    python -m tests.universal.formats.test_attacks DIRECTORY FIRST_SEED LAST_SEED

damages them in a process with limited memory, and prints what happened, as JSON: by
sample the number of damaged checkpoints that were refused, and what was wrong: errors
that are not one line with the path, other errors, and values that differ although the
file has checksums.
"""

import io
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import zipfile

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values

SAMPLES = [
    *("dcp", "weights/single", "weights/sharded", "orbax", "forgather/single"),
    *("deepspeed/zero1_dp2", "deepspeed/zero3_tp2_dp2", "deepspeed/zero3_muon_dp2"),
    *("deepspeed/zero1_dp2_universal", "megatron/torch_dist_ep2"),
    *("megatron/mp_rank_pp2_vp2", "forgather/pipeline-2x2"),
]
# Files whose parts have checksums.
_ZIPS = (".pt", ".bin", ".distcp")
_OPCODES = b"()]}.0acehjqrstuRQbBCGJKMNX\x81\x85\x86\x87\x8a\x8c\x8f\x90\x91\x93\x94"


def cut(content, rng):
    """The content, cut short."""
    return content[: rng.choice((0, len(content) // 2, max(0, len(content) - 1)))]


def flipped(content, rng):
    """The content with up to four changed bytes."""
    changed = bytearray(content or b"x")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(changed))
        new = rng.choice((*_OPCODES, 0, 0x7F, 0x80, 0xFF, changed[at] ^ 1))
        changed[at] = new
    return bytes(changed)


def with_changed_pickle(content, rng):
    """A file of torch.save with changes in its pickle, whose CRC-32 is that of them."""
    if content[:2] != b"PK" or b"PK\5\6" not in content[-100:]:
        path = stored_values.DATA / "weights" / "single" / "pytorch_model.bin"
        content = path.read_bytes()
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            held = old.read(name)
            is_pickle = name.endswith("data.pkl")
            new.writestr(name, flipped(held, rng) if is_pickle else held)
    return made.getvalue()


# Swapped is a file for another one of the checkpoint.
DAMAGES = {"cut": cut, "flipped": flipped, "swapped": None}
DAMAGES["with_changed_pickle"] = with_changed_pickle


def attack(name, directory, seeds):
    """The number of refused checkpoints, and what was wrong."""
    path = stored_values.sample(name, directory)
    before = stored_values.contents(path)
    assert any(isinstance(key, tuple) for key in before), "there are no tensors"
    files = sorted(each for each in path.rglob("*") if each.is_file())
    num_refused, wrong = 0, []
    for seed in seeds:
        for kind, damage in DAMAGES.items():
            rng = random.Random(f"{name} {seed} {kind}")
            file, other = rng.choice(files), rng.choice(files)
            content = file.read_bytes()
            file.write_bytes(damage(content, rng) if damage else other.read_bytes())
            place = f"{kind} {seed}: {file.relative_to(path)}"
            try:
                after = stored_values.contents(path)
                if kind in ("cut", "flipped") and file.suffix in _ZIPS:
                    wrong += [f"{place}: differs"] if after != before else []
            except errors.CheckpointError as error:
                num_refused += 1
                is_clear = str(directory) in str(error) and "\n" not in str(error)
                wrong += [] if is_clear else [f"{place}: {error}"]
            except Exception as error:
                wrong.append(f"{place}: {error!r}")
            file.write_bytes(content)
    if stored_values.contents(path) != before:
        wrong.append("the files were changed")
    return num_refused, wrong


def main(directory, first, last):
    """Attacks all samples; what memory they cannot get is an error."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (4 << 30), resource.RLIM_INFINITY))
    seeds = range(int(first), int(last))
    folder = pathlib.Path(directory)
    print(json.dumps({name: attack(name, folder, seeds) for name in SAMPLES}))


@pytest.mark.parametrize(
    "seeds", ["0 5", pytest.param("5 100", marks=pytest.mark.night)]
)
def test_a_damaged_file_is_one_error_or_is_read(tmp_path, seeds, subtests):
    module = "tests.universal.formats.test_attacks"
    done = subprocess.run(
        [sys.executable, "-m", module, tmp_path, *seeds.split()],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
    )
    report = json.loads(done.stdout)
    assert set(report) == set(SAMPLES)
    for name, (num_refused, wrong) in report.items():
        with subtests.test(name):
            assert wrong == []
            assert num_refused >= 5


@pytest.mark.parametrize(
    "name", ["model.safetensors", "mp_rank_00_model_states.pt", "latest", ".metadata"]
)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match=f"{name} is not a regular file"):
        opening.open_checkpoint(tmp_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
