"""A program with torchdata's StatefulDataLoader over packed rows of ours."""

import functools
import itertools
import json

import grain
import numpy as np

from elastic_ckpt.data import local_batches, sharded_data, torch_loader
from tests import pipelines

SIZE = 12


def mixture():
    make_shard = functools.partial(
        pipelines.mixture, num_shards=48, packing="first_fit"
    )
    return sharded_data.sharded(make_shard, num_shards=48, pipeline="mixture")


def numbers(shard):
    drawn = grain.MapDataset.range(shard, 5 * SIZE, SIZE)
    examples = drawn.map(lambda number: {"tokens": np.array(number)})
    return examples.to_iter_dataset(pipelines.IN_CALLER)


def finite():
    return sharded_data.sharded(
        numbers, num_shards=SIZE, end="padded", pipeline="numbers"
    )


def loader(rank=0, num_ranks=1, *, data=mixture, **options):
    rows = local_batches.LocalBatches(
        data(), rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
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


def passes(num_workers):
    """Each pass over data that ends is whole, and may begin at any of its batches."""
    made, other = (loader(data=finite, num_workers=num_workers) for _ in range(2))
    expected = [list(range(at, at + SIZE)) for at in range(0, 60, SIZE)]
    for num_taken in range(1, 6):
        taken = itertools.islice(made, num_taken)
        assert [batch["tokens"].tolist() for batch in taken] == expected[:num_taken]
        other.load_state_dict([made.state_dict()])
        rest = [batch["tokens"].tolist() for batch in other]
        assert rest == expected[num_taken:]
        # To its end, which can be loaded, too: it begins another pass.
        assert [batch["tokens"].tolist() for batch in made] == rest
        other.load_state_dict(made.state_dict())
        assert [batch["tokens"].tolist() for batch in other] == expected


if __name__ == "__main__":
    changing_worlds()
    later_iterations()
    later_iterations(
        num_workers=2, multiprocessing_context="forkserver", persistent_workers=True
    )
    for num_workers in (0, 1, 3):
        passes(num_workers)
    print("all are equal")
