"""A PyTorch program: torchdata's StatefulDataLoader over packed rows of ours.

    python -m tests.data.stateful_loader

To be run where torch and torchdata are installed. Prints what it compared.
"""

import functools
import json

import numpy as np
from torchdata import stateful_dataloader

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches, sharded_data, torch_dataset
from tests import pipelines

NUM_SHARDS = SIZE = 12


def loader(rank, num_ranks, *, num_workers):
    data = sharded_data.sharded(
        functools.partial(pipelines.concatenated, num_shards=NUM_SHARDS),
        num_shards=NUM_SHARDS,
    )
    rows = local_batches.LocalBatches(
        data, rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
    )
    return stateful_dataloader.StatefulDataLoader(
        torch_dataset.TorchDataset(rows), batch_size=None, num_workers=num_workers
    )


def tokens(batch):
    return np.asarray(batch["tokens"]).tolist()


def main():
    for num_workers in (0, 1):
        one = loader(0, 1, num_workers=num_workers)
        batches = iter(one)
        for _ in range(3):
            next(batches)
        saved = one.state_dict()
        # Rows of 8 tokens from documents of 3 to 9: a buffer is in use.
        assert "remainder_slices" in str(saved)
        expected = [tokens(next(batches)) for _ in range(4)]

        again = loader(0, 1, num_workers=num_workers)
        again.load_state_dict(saved)
        batches = iter(again)
        assert [tokens(next(batches)) for _ in range(4)] == expected
        print(f"{num_workers} workers: resumed in the middle of a buffer")

    # Two ranks save, three go on: the states of the datasets are merged.
    ranks = [iter(loader(rank, 2, num_workers=0)) for rank in range(2)]
    one = iter(loader(0, 1, num_workers=0))
    for _ in range(3):
        whole = [row for rank in ranks for row in tokens(next(rank))]
        assert whole == tokens(next(one))
    loaders = [loader(rank, 2, num_workers=0) for rank in range(2)]
    states = []
    for made in loaders:
        batches = iter(made)
        for _ in range(3):
            next(batches)
        states.append(made.dataset.state_dict())
    three = [loader(rank, 3, num_workers=0) for rank in range(3)]
    for made in three:
        made.dataset.load_state_dict(json.loads(json.dumps(states)))
    batches = [iter(made) for made in three]
    for _ in range(3):
        whole = [row for rank in batches for row in tokens(next(rank))]
        assert whole == tokens(next(one))
    print("2 ranks, then 3: the batches of one")

    try:
        next(iter(loader(0, 1, num_workers=2)))
    except errors.ConfigError as error:
        # torch puts the traceback of its worker before.
        print(f"2 workers: {str(error).strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
