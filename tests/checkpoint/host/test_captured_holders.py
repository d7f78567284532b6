"""Which hosts hold what one of them has captured."""

import jax
import jax.numpy as jnp
import numpy as np

from elastic_ckpt.checkpoint.host import capture


def test_values_that_every_process_has_are_on_all_hosts():
    values = {f"{n}": jnp.full(size, n) for n, size in enumerate([5, 900, 3])}
    values |= {"numpy": np.ones(300, np.float32), "key": jax.random.key(3)}
    captured = capture.capture(values, capture.Memory())
    holders = captured.holders(num_hosts=4)
    parts = [(each.leaf.path, box) for each in captured.parts for box, _ in each.boxes]
    assert holders == dict.fromkeys(parts, (0, 1, 2, 3))
