"""Files with changed bytes are read, or are one error that names a file."""

import random

import pytest

from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import mutations
from tests.universal.formats.test_hostile_sources import problem_of, sample, used

SAMPLES = [
    *("dcp", "dcp_hf", "safetensors", "orbax"),
    *("deepspeed/zero0_dp2", "deepspeed/zero0_bf16_dp2", "deepspeed/zero1_dp2"),
    *("deepspeed/zero1_tp2_pp2_dp2", "deepspeed/zero1_ep2_dp4", "deepspeed/zero3_dp4"),
    *("deepspeed/zero1_tp2_pp2_dp2_universal", "deepspeed/zero3_dp4_universal"),
    *("megatron/torch_dist_ep2", "megatron/torch_dist_tp2_pp2"),
]


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("name", SAMPLES)
def test_changed_bytes_are_one_error_or_are_read(name, tmp_path):
    path = sample(name, tmp_path)
    used(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    num_refused = 0
    for seed in range(200):
        rng = random.Random(f"{name} {seed}")
        file = rng.choice(files)
        content = file.read_bytes()
        changed = mutations.mutated(content, rng)
        if rng.random() < 0.7 and file.suffix in (".pt", ".distcp"):
            try:
                changed = mutations.mutated_pickle(file, rng)
            except FormatError:
                assert file.suffix == ".distcp"
        file.write_bytes(changed)
        problem = problem_of(path)
        assert problem is None or str(tmp_path) in problem, seed
        num_refused += problem is not None
        file.write_bytes(content)
    assert num_refused
