"""Runs of several stages, between which hosts, batch sizes and data may change.

The oracle is one host that is never stopped but to change what the run changes.
"""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import strategies as st

from tests import worlds

HOSTS = [1, 2, 3, 4, 6, 8, 12]
# Multiples of the 12 shards, divisors, and sizes that are neither.
SIZES = [12, 24, 36, 2, 4, 6, 8, 10, 16, 18, 30]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One world of a run, between two changes of hosts or of the batch size."""

    num_hosts: int
    size: int
    num_batches: int
    # How rows lie on hosts: in order, or anyhow.
    order_seed: int
    read_ahead_batches: int
    num_workers: int
    in_files: bool

    def row_hosts(self):
        in_order = np.repeat(np.arange(self.num_hosts), self.size // self.num_hosts)
        if not self.order_seed:
            return in_order
        return np.random.default_rng(self.order_seed).permutation(in_order)


@st.composite
def stages(draw, max_hosts=12, num_workers=(0,)):
    size = draw(st.sampled_from(SIZES))
    fitting = [h for h in HOSTS if size % h == 0 and h <= max_hosts]
    return Stage(
        num_hosts=draw(st.sampled_from(fitting)),
        size=size,
        num_batches=draw(st.integers(0, 4)),
        order_seed=draw(st.integers(0, 3)),
        read_ahead_batches=draw(st.integers(0, 2)),
        num_workers=draw(st.sampled_from(num_workers)),
        in_files=draw(st.booleans()),
    )


def batches_until_end(world, num_batches):
    """At most so many batches, and whether the data goes on."""
    batches = []
    try:
        for _ in range(num_batches):
            batches.append(world.batch())
    except StopIteration:
        return batches, False
    return batches, True


def oracle(of_stages, run):
    """The batches of each stage on one host, which keeps its cursors in memory."""
    elements, position, cursors = [], None, None
    for data, stage in zip(of_stages, run, strict=True):
        one = worlds.World(data, 1, stage.size)
        (host,) = one.hosts
        if position:
            host.go_to(
                position, lambda shards, held=cursors: {s: held[s] for s in shards}
            )
        batches, goes_on = batches_until_end(one, stage.num_batches)
        elements.append((batches, goes_on))
        position, cursors = host.position(), host.shard_cursors()
    return elements


def check(of_stages, run, make_directory):
    """Every stage on its hosts, from the state of the one before it; all its batches.

    At its end data stays at its end.

    Args:
      of_stages: the data of each stage.
      run: the stages.
      make_directory: makes a directory of a name.
    """
    load, batches_so_far = None, []
    expected = oracle(of_stages, run)
    for data, stage, (in_one, to_go_on) in zip(of_stages, run, expected, strict=True):
        world = worlds.World(
            dataclasses.replace(data, num_workers=stage.num_workers),
            stage.num_hosts,
            stage.size,
            stage.row_hosts(),
            read_ahead=stage.read_ahead_batches,
        )
        if load:
            load(world)
        batches, goes_on = batches_until_end(world, stage.num_batches)
        assert list(map(worlds.content, batches)) == list(map(worlds.content, in_one))
        assert goes_on == to_go_on
        batches_so_far += batches
        if stage.in_files:
            saved = make_directory("data")
            world.write(saved)
            load = functools.partial(worlds.World.read, directory=saved)
        else:
            load = functools.partial(worlds.World.load, saved=world.save())
        for _ in range(0 if goes_on else 3):
            with pytest.raises(StopIteration):
                world.batch()
        world.close()
    return batches_so_far
