"""What a host uploads of a step that no RAM disk has."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from elastic_ckpt.checkpoint.host import capture, captured_step


def test_values_that_every_process_has_are_uploaded_once_in_equal_shares():
    sizes = dict(enumerate([5, 900, 3, 900, 4, 900, 900, 1]))
    values = {f"{n}": jnp.full(size, n, jnp.float32) for n, size in sizes.items()}
    values |= {"numpy": np.ones(300, np.float32), "key": jax.random.key(3)}
    captured = capture.capture(values, capture.Memory())
    uploaded = {number: [] for number in range(4)}
    for number in uploaded:
        owners = captured_step.Owners(captured, number=number, num_hosts=4)
        for leaf, part in enumerate(captured.parts):
            for box, _ in part.boxes:
                assert owners.group_of(leaf, part.shard(box)) == "0,1,2,3"
                if owners.is_own(leaf, part.shard(box)):
                    uploaded[number].append(part.leaf)
    paths = [leaf.path for of_host in uploaded.values() for leaf in of_host]
    # Each process may have another random key.
    assert sorted(paths) == sorted([*values, "key", "key", "key"])
    num_bytes = [sum(math.prod(each.shape) for each in of) for of in uploaded.values()]
    assert max(num_bytes) <= sum(num_bytes) / 4 + 900
