"""Batches of preference pairs for MaxText's trainer, and the choice of that trainer."""

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import watch
from elastic_ckpt.integrations import maxtext, maxtext_preferences, maxtext_seam


class Batches:
    """Global batches of a number of rows over all devices, all of whose rows differ."""

    def __init__(self, *, rows, batches=2):
        self._left = [
            np.arange(rows * 2, dtype=np.int32).reshape(rows, 2) + 1000 * number
            for number in range(batches)
        ]

    def __next__(self):
        if not self._left:
            raise StopIteration
        mesh = jax.sharding.Mesh(jax.devices(), ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
        rows = self._left.pop(0)
        names = (*maxtext_preferences.FEATURES, "example_id")
        return {name: jax.device_put(rows, sharding) for name in names}


def rows_by_device(batch):
    (array, *_) = batch.values()
    return {shard.device: shard.data.tolist() for shard in array.addressable_shards}


def test_parts_of_a_batch_have_the_rows_of_each_device_in_their_order():
    rows = 4 * jax.device_count()
    (whole,) = maxtext_preferences.PairIterator(Batches(rows=rows, batches=1))
    assert set(whole) == set(maxtext_preferences.FEATURES)
    parts = list(
        maxtext_preferences.PairIterator(Batches(rows=rows, batches=1), parts=2)
    )
    assert [each["prompt_ids"].shape for each in parts] == [(rows // 2, 2)] * 2
    for device, expected in rows_by_device(whole).items():
        first, second = (rows_by_device(each)[device] for each in parts)
        assert first + second == expected


def test_it_ends_between_batches_where_the_run_does():
    asked, ended = [], []

    def goes_on():
        asked.append(True)
        return len(asked) < 2

    iterator = maxtext_preferences.PairIterator(
        Batches(rows=2 * jax.device_count()),
        parts=2,
        goes_on=goes_on,
        ended=lambda: ended.append(True),
    )
    assert len(list(iterator)) == 2
    # That is not the end of the data.
    assert (len(asked), ended) == (2, [])
    assert iterator.num_batches == 1


def test_the_end_of_the_data_is_told_once():
    ended = []
    iterator = maxtext_preferences.PairIterator(
        Batches(rows=jax.device_count()), ended=lambda: ended.append(True)
    )
    assert len(list(iterator)) == 2
    assert ended == [True]


def test_an_error_of_the_data_passes_what_maxtext_takes_for_its_end():
    class Broken:
        def __next__(self):
            raise errors.DataError("no such column")

    with pytest.raises(maxtext.PastMaxText, match="no such column"):
        next(maxtext_preferences.PairIterator(Broken()))


def test_a_batch_of_an_evaluation_begins_that_phase():
    begun = []
    iterator = maxtext_preferences.PairIterator(
        Batches(rows=jax.device_count()), begin=begun.append
    )
    assert len(list(iterator)) == 2
    assert begun == ["evaluate"] * 3
    assert watch.COMPILE not in begun


@pytest.mark.parametrize(
    ("arguments", "trainer"),
    [
        (["use_dpo=true"], maxtext_seam.PREFERENCES),
        (["use_dpo=True", "steps=3"], maxtext_seam.PREFERENCES),
        (["use_dpo=false"], maxtext_seam.PRE_TRAIN),
        (["steps=3"], maxtext_seam.PRE_TRAIN),
        ([], maxtext_seam.PRE_TRAIN),
    ],
)
def test_the_trainer_follows_from_the_keys(tmp_path, arguments, trainer):
    assert maxtext_seam.trainer_of(arguments) is trainer
    path = tmp_path / "run.yml"
    path.write_text("".join(f"{each.replace('=', ': ')}\n" for each in arguments))
    assert maxtext_seam.trainer_of([str(path)]) is trainer
    if arguments:
        path.write_text("use_dpo: false\nsteps: 1\n")
        assert maxtext_seam.trainer_of([str(path), *arguments]) is trainer
