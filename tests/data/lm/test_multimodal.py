"""Documents of text and media in rows: packed by tokens, decoded afterwards."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from elastic_ckpt import data
from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches
from elastic_ckpt.data.lm import multimodal
from tests.data.lm.test_rows import source

LENGTH = 24
IMAGE, SOUND = 900, 901
DECODED = []


def decode(data):
    """A "picture" of one colour."""
    DECODED.append(data)
    return np.full((2, 2), data[0], np.uint8)


MODALITIES = {
    "images": multimodal.Modality(decode=decode, shape=(2, 2), max_per_row=3),
    "audio": multimodal.Modality(
        decode=lambda data: np.full(3, data[0], np.float32),
        shape=(3,),
        max_per_row=2,
        dtype="float32",
    ),
}


def image(number, num_tokens=4):
    # More bytes than a state may have.
    data = bytes([number % 256]) * 5_000
    return multimodal.Encoded(
        modality="images", data=data, num_tokens=num_tokens, placeholder=IMAGE
    )


def sound(number):
    return multimodal.Encoded(
        modality="audio", data=bytes([number % 256]), num_tokens=2, placeholder=SOUND
    )


def parts(number):
    """Text of 2 to 6 tokens, with an image, a sound, two images, or none of them."""
    text = np.arange(2 + number % 5, dtype=np.int32) + 10 * number
    media = ([], [image(number)], [sound(number)], [image(number), image(number + 1)])
    return [text[:1], *media[number % 4], text[1:].tolist()]


def packed(documents, **more):
    settings = {"modalities": MODALITIES, "length": LENGTH, **more}
    return multimodal.MultimodalRows(source(documents), **settings)


def test_a_row_has_its_media_with_their_places():
    documents = [[[5, 6], image(1), [7]], [[8], sound(2), image(3), [9, 10]]]
    (row,) = packed(documents)
    inputs = [5, 6, *[IMAGE] * 4, 7, 8, *[SOUND] * 2, *[IMAGE] * 4, 9, 10]
    assert row["inputs"].tolist() == inputs + [0] * 8
    after = [*inputs[1:7], 0, *inputs[8:], 0] + [0] * 8
    learned = [0 if token in (IMAGE, SOUND) else token for token in after]
    assert row["targets"].tolist() == learned
    assert row["inputs_segmentation"].tolist() == [1] * 7 + [2] * 9 + [0] * 8
    # Neither a placeholder nor the first token of another document is a target.
    learned = [1, 0, 0, 0, 0, 1, 0] + [0] * 6 + [2, 2, 0] + [0] * 8
    assert row["targets_segmentation"].tolist() == learned
    assert row["inputs_position"].tolist() == [*range(7), *range(9)] + [0] * 8
    assert row["images"][:, 0, 0].tolist() == [1, 3, 0]
    assert row["images_segmentation"].tolist() == [1, 2, 0]
    assert row["images_start"].tolist() == [2, 10, 0]
    assert row["images_length"].tolist() == [4, 4, 0]
    assert row["audio"].tolist() == [[2] * 3, [0] * 3]
    assert row["audio_start"].tolist() == [8, 0]
    assert row["images"].dtype == np.uint8
    assert row["audio"].dtype == np.float32


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_each_medium_is_in_one_row_and_states_go_on_without_media(packing):
    documents = list(map(parts, range(60)))
    rows, shown = iter(packed(documents, packing=packing)), []
    for row in packed(documents, packing=packing):
        state = json.dumps(rows.get_state())
        assert len(state) < 1000
        DECODED.clear()
        rows = iter(packed(documents, packing=packing))
        rows.set_state(json.loads(state))
        assert not DECODED
        np.testing.assert_equal(next(rows), row)
        # Media are decoded when their row is delivered.
        is_shown = row["images_segmentation"] > 0
        assert len(DECODED) == np.count_nonzero(is_shown)
        shown += row["images"][is_shown, 0, 0].tolist()
        places = ("images_start", "images_length", "images_segmentation")
        for start, length, segment in zip(*map(row.get, places), strict=True):
            tokens = slice(start, start + length)
            assert (row["inputs"][tokens] == IMAGE).all()
            assert set(row["inputs_segmentation"][tokens]) <= {segment}
    expected = [
        part.data[0]
        for part in itertools.chain.from_iterable(documents)
        if getattr(part, "modality", "") == "images"
    ]
    assert sorted(shown) == sorted(expected)


def test_documents_whose_media_have_changed_are_refused():
    one, same, other = (iter(packed([[[1, 2], image(n)]] * 9)) for n in (1, 1, 2))
    next(one)
    same.set_state(one.get_state())
    with pytest.raises(errors.DataError, match=r"the documents .* have changed"):
        other.set_state(one.get_state())


def test_a_document_that_is_too_long_ends_before_a_medium_that_does_not_fit():
    long = [[1] * 20, image(1, num_tokens=5), [2]]
    many = [[3, 3], *[image(number) for number in range(4)], [4]]
    cut = [list(range(2, 41))]
    rows = list(packed([long, many, cut], max_examples=1))
    by_first = {int(row["inputs"][0]): row for row in rows}
    assert by_first[3]["images_segmentation"].tolist() == [1, 1, 1]
    assert int((by_first[3]["inputs"] != 0).sum()) == 14
    assert by_first[1]["inputs"].tolist() == [1] * 20 + [0] * 4
    assert by_first[2]["inputs"].tolist() == list(range(2, 26))
    assert by_first[2]["targets"].tolist() == [*range(3, 26), 0]
    # Without text after its first token there is nothing to learn.
    assert not list(packed([[image(1), image(2)], [[5], image(1)]]))


@pytest.mark.parametrize(("most", "length"), [(1, 24), (3, 12)])
def test_documents_that_come_over_to_a_stage_are_cut_for_it(most, length):
    documents = [[np.full(9, 5), image(n), [6], image(n), [7]] for n in range(90)]
    stages = []
    for of_stage in ((3, 24), (most, length)):
        images = dataclasses.replace(MODALITIES["images"], max_per_row=of_stage[0])
        made = multimodal.MultimodalRows(
            source(documents), modalities={"images": images}, length=of_stage[1]
        )
        of_rows = data.sharded(lambda _, made=made: made, num_shards=1, pipeline="x")
        stages.append(data.Stage(begin=5 * len(stages), data=of_rows))
    assert stages[0].data.identity() != stages[1].data.identity()
    batches = local_batches.LocalBatches(data.staged(stages), global_batch_size=1)
    for batch in itertools.islice(batches, 5, 12):
        row = {name: values[0] for name, values in batch.items()}
        assert len(row["images"]) == most
        for start, size in zip(row["images_start"], row["images_length"], strict=True):
            assert (row["inputs"][start : start + size] == IMAGE).all()
            assert start + size <= length
