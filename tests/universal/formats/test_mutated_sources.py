"""Files with changed bytes are read, or are one error that names a file.

Parts with a checksum are refused or equal those saved: files of `torch.save`, items of
distributed checkpoints, and everything on RAM disks. Any other tensor that still has
its name, type and shape has its values, unless its own bytes in safetensors or in
Orbax's data files were changed. If a pickle was changed and its CRC-32 made to fit,
values may be others.
"""

import random

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import mutations
from tests.universal.formats.source_contents import (
    contents,
    key_of,
    key_of_weights,
    problem_of,
    sample,
)

SAMPLES = [
    *("dcp", "dcp_hf", "safetensors", "orbax", "ram"),
    *("deepspeed/zero0_dp2", "deepspeed/zero0_bf16_dp2", "deepspeed/zero1_dp2"),
    *("deepspeed/zero1_muon_dp2", "deepspeed/zero2_offload_muon_dp2"),
    *("deepspeed/zero1_tp2_pp2_dp2", "deepspeed/zero1_ep2_dp4", "deepspeed/zero3_dp4"),
    *("deepspeed/zero1_tp2_pp2_dp2_universal", "deepspeed/zero3_dp4_universal"),
    *("megatron/torch_dist_ep2", "megatron/torch_dist_tp2_pp2"),
    *("megatron/mp_rank_pp2_vp2", "forgather/pipeline-2x2", "forgather/single"),
    *("forgather/without_manifest", "weights/sharded", "weights/meta"),
]
ZIPS = (".pt", ".pth", ".distcp", ".bin")


def changed_tensors(path, file, content, changed):
    """The keys of tensors without checksums whose own bytes differ in a file."""
    is_orbax = path.name == "orbax"
    if file.suffix != ".safetensors" and not (is_orbax and file.parent.name == "d"):
        return set()
    pairs = enumerate(zip(content, changed, strict=False))
    positions = [at for at, (old, new) in pairs if old != new]
    keys = set()
    for tensor in opening.open_checkpoint(path).tensors:
        held = [each for each in tensor.fragments if each.file == str(file)]
        spans = [
            (each.offset, each.box.volume * tensor.dtype.itemsize) for each in held
        ]
        if is_orbax or any(a <= at < a + n for a, n in spans for at in positions):
            keys |= {key_of(tensor), key_of_weights(tensor)}
    return keys


def check_changed(path, before, rng):
    """Changes a file, reads the checkpoint, and writes the file again.

    Returns whether it was refused.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file())
    file = rng.choice(files)
    content = file.read_bytes()
    changed, is_fitting = mutations.mutated(content, rng), False
    if rng.random() < 0.5 and file.suffix in ZIPS:
        try:
            changed, is_fitting = mutations.mutated_pickle(file, rng), True
        except FormatError:
            assert file.suffix == ".distcp"
    exempt = changed_tensors(path, file, content, changed)
    file.write_bytes(changed)
    problem = problem_of(path)
    if problem is not None:
        assert str(path) in problem, file
    elif not is_fitting:
        after = contents(path)
        if file.suffix in ZIPS or path.name == "ram":
            assert after == before, file
        kept = [key for key in before.keys() & after.keys() if key[0] == "tensor"]
        differing = {key for key in kept if after[key] != before[key]}
        assert differing <= exempt, file
    file.write_bytes(content)
    return problem is not None


def check(name, directory, seeds):
    path = sample(name, directory)
    before = contents(path)
    assert any(key[0] == "tensor" for key in before)
    refused = [
        check_changed(path, before, random.Random(f"{name} {seed}")) for seed in seeds
    ]
    assert contents(path) == before
    return sum(refused)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_few_changed_bytes_are_one_error_or_are_read(name, tmp_path):
    check(name, tmp_path, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_changed_bytes_are_one_error_or_are_read(name, tmp_path):
    assert check(name, tmp_path, range(4, 84))
