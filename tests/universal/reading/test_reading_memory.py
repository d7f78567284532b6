"""The memory that a load takes beside the arrays, measured in a separate process."""

import json
import multiprocessing
import pathlib
import threading

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import universal
from elastic_ckpt.universal.rules.layout import Layout

ARRAYS, SHAPE = 8, (4096, 4096)
# A chunk, an array, is held twice while it is decoded.
BUDGET_BYTES = 2 * 2**26
# For allocators and threads of TensorStore.
SLACK_BYTES = 2**25


def loaded(path, dims, *, arrays=ARRAYS):
    shape = SHAPE if dims == "a b" else SHAPE[::-1]
    abstract = {
        f"w{number}": jax.ShapeDtypeStruct(shape, np.float32)
        for number in range(arrays)
    }
    rules = [{"from": {"w{n}": "a b"}, "to": {"w{n}": dims}}]
    layout = Layout.parse(json.dumps({"version": 1, "rules": rules}))
    state = universal.load(path, abstract, layout=layout, budget_bytes=BUDGET_BYTES)
    return jax.block_until_ready(state)


def anonymous_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def beyond_the_arrays(directory, dims):
    """The most anonymous memory of a load, less its arrays."""
    path = pathlib.Path(directory)
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for name, arrays in (("one", 1), ("all", ARRAYS)):
        tree = {f"w{number}": jax.device_put(values) for number in range(arrays)}
        ocp.save(path / name, tree)
    del values, tree
    # Libraries and threads begin.
    loaded(path / "one", dims, arrays=1)
    before = peak = anonymous_bytes()
    ended = threading.Event()

    def watch():
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    state = loaded(path / "all", dims)
    ended.set()
    watcher.join()
    return peak - before - sum(leaf.nbytes for leaf in state.values())


@pytest.mark.night
@pytest.mark.parametrize("dims", ["a b", "b a"])
def test_a_load_of_orbax_takes_no_more_than_its_budget_beside_the_arrays(
    tmp_path, dims
):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(beyond_the_arrays, (str(tmp_path), dims))
    assert taken < BUDGET_BYTES + SLACK_BYTES, f"{taken / 2**20:.0f} MiB"
