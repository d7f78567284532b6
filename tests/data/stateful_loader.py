"""A PyTorch program: torchdata's StatefulDataLoader over packed rows of ours.

    python -m tests.data.stateful_loader

To be run where torch and torchdata are installed. Prints what it compared.
"""

import functools
import json

import grain
import numpy as np
from torch.utils import data as torch_data
from torchdata import stateful_dataloader

from elastic_ckpt.core import errors
from elastic_ckpt.data import elastic_data, local_batches, sharded_data, torch_dataset
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


def loader(
    rank,
    num_ranks,
    *,
    dataset=endless,
    make=stateful_dataloader.StatefulDataLoader,
    batch_size=None,
    num_workers,
    **more,
):
    rows = local_batches.LocalBatches(
        dataset(), rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
    )
    return make(
        torch_dataset.TorchDataset(rows),
        batch_size=batch_size,
        num_workers=num_workers,
        **more,
    )


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
    """Ranks and workers change, and the state is that of datasets or of loaders."""
    for name, dataset in (
        ("concatenated", functools.partial(mixture, lm_rows.CONCAT_THEN_SPLIT)),
        ("fitted", functools.partial(mixture, lm_rows.FIRST_FIT)),
    ):
        one = [iter(loader(0, 1, dataset=dataset, num_workers=0))]
        states = None
        for num_ranks, num_workers, kind, every in (
            (4, 2, "dataset", 1),
            (3, 4, "loader", 1),
            (2, 1, "dataset", 3),
            (1, 3, "loader", 2),
            (2, 0, "loader", 1),
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
                if states is not None:
                    rank.dataset.load_state_dict(states)
            batches = [iter(rank) for rank in ranks]
            for _ in range(4):
                assert rows(batches) == rows(one)
            states = [
                (rank if kind == "loader" else rank.dataset).state_dict()
                for rank in ranks
            ]
            states = json.loads(json.dumps(states))
        print(f"{name}: ranks and workers changed: the batches of one")


def same_world():
    """A loader loads its own state, with the numbers that saved it and no others."""
    made = functools.partial(
        loader, 1, 2, dataset=functools.partial(mixture, lm_rows.FIRST_FIT)
    )
    first = made(num_workers=3)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    saved = first.state_dict()
    expected = [rows([batches]) for _ in range(4)]
    again = made(num_workers=3)
    again.load_state_dict(saved)
    batches = iter(again)
    assert [rows([batches]) for _ in range(4)] == expected
    try:
        other = made(num_workers=2)
        other.load_state_dict(saved)
        iter(other)
    except errors.DataError as error:
        print("2 workers load 3:", str(error).strip().splitlines()[-1])
    other.load_state_dict({})


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
        )
        for _ in range(2):
            batches = [iter(made)]
            for _ in range(3):
                assert rows(batches) == rows(one)
        # The state of a loader that has not begun, which starts its workers.
        begin = loader(0, 1, dataset=dataset, num_workers=num_workers)
        begin.state_dict()
        begin.dataset.load_state_dict(made.dataset.state_dict())
        assert rows([iter(begin)]) == rows(one)
        print(f"{num_workers} workers ({context}): a later iteration goes on")


def main():
    changing_worlds()
    same_world()
    later_iterations()
    for num_workers in (0, 1, 3):
        passes = loader(
            0,
            1,
            dataset=finite,
            num_workers=num_workers,
            persistent_workers=num_workers == 3,
        )
        expected = [list(range(at, at + SIZE)) for at in range(0, 60, SIZE)]
        for _ in range(3):
            assert list(map(tokens, passes)) == expected
        ended = loader(0, 1, dataset=finite, num_workers=num_workers)
        ended.dataset.load_state_dict(passes.dataset.state_dict())
        assert list(map(tokens, ended)) == expected
        # From the middle of a pass on, and then a whole one.
        batches = iter(passes)
        assert [tokens(next(batches)) for _ in range(2)] == expected[:2]
        ended.dataset.load_state_dict([passes.state_dict()])
        assert list(map(tokens, ended)) == expected[2:]
        assert list(map(tokens, ended)) == expected
        print(f"{num_workers} workers: each pass over data that ends is whole")

    # A plain loader without workers has the state of its dataset.
    plain = loader(0, 1, make=torch_data.DataLoader, num_workers=0)
    batches = iter(plain)
    next(batches)
    again = loader(0, 1, make=torch_data.DataLoader, num_workers=0)
    again.dataset.load_state_dict(plain.dataset.state_dict())
    assert tokens(next(iter(again))) == tokens(next(batches))
    print("a plain loader: resumed")

    for make in (torch_data.DataLoader, stateful_dataloader.StatefulDataLoader):
        for kind, num_workers, batch_size in (
            ("2 workers", 2, None),
            ("1 worker", 1, None),
            ("batches", 0, 1),
        ):
            made = loader(
                0, 1, make=make, batch_size=batch_size, num_workers=num_workers
            )
            try:
                next(iter(made))
                came = "iterates"
            except errors.ConfigError as error:
                # torch puts the traceback of its worker before.
                came = str(error).strip().splitlines()[-1].rpartition("Error: ")[2]
            print(f"{make.__name__} of {kind}: {came}")


if __name__ == "__main__":
    main()
