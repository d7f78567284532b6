"""A program with torchdata's StatefulDataLoader over packed rows of ours."""

import functools
import itertools
import json

import numpy as np

from elastic_ckpt.data import local_batches, sharded_data, torch_loader
from tests import pipelines

SIZE = 12


def mixture(sizes=(0, 0), packing="first_fit", num_shards=48):
    """A mixture, which ends if it has sizes; some shards then have no document."""
    make_shard = functools.partial(
        pipelines.mixture, num_shards=num_shards, packing=packing, sizes=sizes
    )
    end = "padded" if any(sizes) else "never"
    return sharded_data.sharded(
        make_shard, num_shards=num_shards, end=end, pipeline="mixture"
    )


def loader(rank=0, num_ranks=1, *, data=None, size=SIZE, **options):
    rows = local_batches.LocalBatches(
        data or mixture(), rank=rank, num_ranks=num_ranks, global_batch_size=size
    )
    return torch_loader.TorchLoader(rows, **options)


def rows(batches):
    """The next global batch, which ranks read: all features, row by row."""
    parts = [{k: v.numpy() for k, v in next(each).items()} for each in batches]
    return {
        name: np.concatenate([p[name] for p in parts]).tolist() for name in parts[0]
    }


def changing_worlds():
    """Ranks and workers change."""
    one, states = [iter(loader())], None
    for num_ranks, num_workers, every in (
        (4, 2, 1),
        (3, 4, 1),
        (2, 1, 3),
        (1, 3, 3),
        (2, 0, 1),
    ):
        options = {"num_workers": num_workers, "snapshot_every_n_steps": every}
        ranks = [loader(rank, num_ranks, **options) for rank in range(num_ranks)]
        for rank in ranks:
            # The state of a loader that has not begun starts no workers.
            assert rank.state_dict()["position"] == {"batches": []}
            if states is not None:
                rank.load_state_dict(states)
        batches = [iter(rank) for rank in ranks]
        for _ in range(4):
            assert rows(batches) == rows(one)
        states = json.loads(json.dumps([rank.state_dict() for rank in ranks]))


def later_iterations(**options):
    """An iteration goes on where the one before stopped, in workers too."""
    one, made = [iter(loader())], loader(**options)
    for _ in range(2):
        batches = [iter(made)]
        for _ in range(3):
            assert rows(batches) == rows(one)
    # It goes back to its own state, too.
    saved = made.state_dict()
    rows(batches)
    made.load_state_dict(saved)
    assert made.state_dict() == saved
    assert rows([iter(made)]) == rows(one)


def stops(saved_by, loaded_by, data):
    """Finite data goes on after each of its batches; after its end, it begins again.

    The state is of a loader with `saved_by` workers; one with `loaded_by` loads it.
    """
    one, made, other = (
        loader(data=mixture(*data), size=2, num_workers=number)
        for number in (0, saved_by, loaded_by)
    )
    expected = [rows([iter([batch])]) for batch in one]
    taken = iter(made)
    for number in range(len(expected) + 1):
        other.load_state_dict(json.loads(json.dumps(made.state_dict())))
        rest = [rows([iter([batch])]) for batch in other]
        assert rest == expected[number:], (data, number)
        is_more = next(taken, None) is not None
        assert is_more == (number < len(expected))
    other.load_state_dict(made.state_dict())
    assert [rows([iter([batch])]) for batch in other] == expected
    return len(expected) + 1


if __name__ == "__main__":
    changing_worlds()
    later_iterations()
    later_iterations(
        num_workers=2, multiprocessing_context="forkserver", persistent_workers=True
    )
    for saved_by, loaded_by in ((0, 2), (2, 1)):
        stops(saved_by, loaded_by, ((1, 12), "first_fit", 9))
    # A loader in this process loads the state without starting any worker.
    packings = [None, "", "first_fit", "concat_then_split"]
    finite_data = itertools.product(
        [(1, 12), (2, 2), (7, 3), (30, 9)], packings, [1, 4, 9]
    )
    tried = [
        stops(saved_by, 0, data)
        for data, saved_by in itertools.product(finite_data, (0, 2, 3))
    ]
    assert sum(tried) >= 972
    print("all are equal")
