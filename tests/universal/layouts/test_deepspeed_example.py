"""The shipped example of a layout, with a checkpoint that DeepSpeed wrote."""

import numpy as np

from elastic_ckpt.universal import opening, shipped_layouts
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values
from tests.universal.rules.relayout import relayout, saved

STATES = {"params": "fp32", "opt_state/0/mu": "exp_avg", "opt_state/0/nu": "exp_avg_sq"}
QUERIES, D = 2, 2


def test_the_example_reads_parameters_moments_and_steps(tmp_path):
    path = stored_values.unpacked("deepspeed/zero1_tp2_pp2_dp2.tar.xz", tmp_path)
    checkpoint = opening.open_checkpoint(path)
    tensors = [
        saved(each.name, stored_values.read(each), each.kind, **dict(each.ranks))
        for each in checkpoint.tensors
    ]
    layout = shipped_layouts.load("deepspeed_example", sizes={"vocab": kv.VOCAB})
    layout = layout.with_values(checkpoint.values)
    made = relayout(layout, tensors, checkpoint.axes)
    assert made["opt_state/0/count"] == made["step"] == 2
    for prefix, state in STATES.items():
        for path, array in {
            "embedding": kv.known(
                state, "tied_modules.embed.words.weight", (kv.VOCAB, kv.EMBED)
            ),
            "block_3/norm1": kv.known(state, "3.norm1.weight", (kv.EMBED,)),
            "block_1/norm2": kv.merged(
                "1.norm2.weight",
                [
                    kv.of_rank(state, "1.norm2.weight", (kv.EMBED,), rank, 2)
                    for rank in range(2)
                ],
            ),
            **attention(state, "2"),
        }.items():
            name = f"{prefix}/{path}"
            assert made[name].shape == array.shape, name
            assert made[name].tobytes() == array.tobytes(), name


def attention(state, block):
    def known(name):
        return kv.known(state, f"{block}.{name}", kv.BLOCK[name])

    qkv = known("qkv.weight").reshape(-1, QUERIES + 2, D, kv.EMBED)
    qkv = qkv.transpose(3, 0, 1, 2)
    gate, up = np.split(known("gate_up.weight").T, 2, axis=1)
    return {
        f"block_{block}/query": qkv[:, :, :QUERIES],
        f"block_{block}/key": qkv[:, :, QUERIES],
        f"block_{block}/value": qkv[:, :, QUERIES + 1],
        f"block_{block}/gate": gate,
        f"block_{block}/up": up,
        f"block_{block}/out/kernel": known("dense.weight").T,
        f"block_{block}/down": known("down.weight").T,
    }
