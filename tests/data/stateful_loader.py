"""A PyTorch program: torchdata's StatefulDataLoader over packed rows of ours.

    python -m tests.data.stateful_loader

To be run where torch and torchdata are installed. Prints what it compared.
"""

import functools
import json

import grain
import numpy as np

from elastic_ckpt.data import elastic_data, local_batches, sharded_data, torch_loader
from elastic_ckpt.data.lm import rows as lm_rows
from tests import pipelines

NUM_SHARDS = SIZE = 12


def endless():
    return sharded_data.sharded(
        functools.partial(pipelines.concatenated, num_shards=NUM_SHARDS),
        num_shards=NUM_SHARDS,
        pipeline="concatenated",
    )


def numbers(shard):
    drawn = grain.MapDataset.range(shard, 5 * NUM_SHARDS, NUM_SHARDS)
    examples = drawn.map(lambda number: {"tokens": np.array(number)})
    return examples.to_iter_dataset(pipelines.IN_CALLER)


def finite():
    return sharded_data.sharded(
        numbers,
        num_shards=NUM_SHARDS,
        end=elastic_data.End.PADDED,
        pipeline="numbers",
    )


def loader(rank, num_ranks, *, dataset=endless, **options):
    rows = local_batches.LocalBatches(
        dataset(), rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
    )
    return torch_loader.TorchLoader(rows, **options)


def tokens(batch):
    return np.asarray(batch["tokens"]).tolist()


def mixture(packing):
    return sharded_data.sharded(
        functools.partial(pipelines.mixture, num_shards=48, packing=packing),
        num_shards=48,
        pipeline="mixture",
    )


def rows(batches):
    """The next global batch, which ranks read: all features, row by row."""
    parts = [{k: v.numpy() for k, v in next(each).items()} for each in batches]
    return {
        name: np.concatenate([p[name] for p in parts]).tolist() for name in parts[0]
    }


def changing_worlds():
    """Ranks and workers change."""
    for name, dataset in (
        ("concatenated", functools.partial(mixture, lm_rows.CONCAT_THEN_SPLIT)),
        ("fitted", functools.partial(mixture, lm_rows.FIRST_FIT)),
    ):
        one = [iter(loader(0, 1, dataset=dataset, num_workers=0))]
        states = None
        for num_ranks, num_workers, every in (
            (4, 2, 1),
            (3, 4, 1),
            (2, 1, 3),
            (1, 3, 3),
            (2, 0, 1),
        ):
            ranks = [
                loader(
                    rank,
                    num_ranks,
                    dataset=dataset,
                    num_workers=num_workers,
                    snapshot_every_n_steps=every,
                )
                for rank in range(num_ranks)
            ]
            for rank in ranks:
                # The state of a loader that has not begun starts no workers.
                assert rank.state_dict()["position"] == {"batches": []}
                if states is not None:
                    rank.load_state_dict(states)
            batches = [iter(rank) for rank in ranks]
            for _ in range(4):
                assert rows(batches) == rows(one)
            states = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
        print(f"{name}: ranks and workers changed: the batches of one")


def later_iterations():
    """An iteration goes on where the one before stopped, in workers too."""
    dataset = functools.partial(mixture, lm_rows.FIRST_FIT)
    for num_workers, context in ((0, None), (2, "forkserver")):
        one = [iter(loader(0, 1, dataset=dataset, num_workers=0))]
        made = loader(
            0,
            1,
            dataset=dataset,
            num_workers=num_workers,
            multiprocessing_context=context,
            persistent_workers=num_workers > 0,
        )
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
        print(f"{num_workers} workers ({context}): a later iteration goes on")


def passes(num_workers):
    """Each pass over data that ends is whole, and may begin in its middle."""
    made = loader(0, 1, dataset=finite, num_workers=num_workers)
    expected = [list(range(at, at + SIZE)) for at in range(0, 60, SIZE)]
    for _ in range(3):
        assert list(map(tokens, made)) == expected
    ended = loader(0, 1, dataset=finite, num_workers=num_workers)
    ended.load_state_dict(made.state_dict())
    assert list(map(tokens, ended)) == expected
    batches = iter(made)
    assert [tokens(next(batches)) for _ in range(2)] == expected[:2]
    ended.load_state_dict([made.state_dict()])
    assert list(map(tokens, ended)) == expected[2:]
    assert list(map(tokens, ended)) == expected
    print(f"{num_workers} workers: each pass over data that ends is whole")


if __name__ == "__main__":
    changing_worlds()
    later_iterations()
    for num_workers in (0, 1, 3):
        passes(num_workers)
