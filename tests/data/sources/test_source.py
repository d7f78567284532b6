import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import source
from tests import corpora


def numbers(*blocks):
    return corpora.Numbers(blocks=blocks)


@pytest.mark.parametrize(
    ("failures", "refusal", "num_tries"),
    [
        ([], None, 1),
        ([ConnectionError("reset by peer")] * 3, None, 4),
        (
            [OSError(5, "bad")] * 4,
            r"^/data/numbers-0: cannot be read, in 4 tries \(.*bad.*restore",
            4,
        ),
        ([errors.DataError("cut short")], "^cut short$", 1),
    ],
)
def test_an_index_that_cannot_be_read_is_tried_again(failures, refusal, num_tries):
    tries, failing = [], iter(failures)

    class Unreliable(corpora.Numbers):
        def index(self, file):
            tries.append(file)
            for failure in failing:
                raise failure
            return super().index(file)

    dataset = Unreliable(blocks=((3,),))
    if refusal is None:
        assert source.num_records(dataset) == 3
    else:
        with pytest.raises(errors.DataError, match=refusal):
            source.num_records(dataset)
    assert tries == ["/data/numbers-0"] * num_tries


def test_any_other_blocks_have_another_fingerprint():
    sources = [
        numbers((3, 4), (5,)),
        numbers((4, 3), (5,)),
        numbers((7,), (5,)),
        numbers((3, 4), (5, 0)),
        numbers((3, 4), (6,)),
        numbers((5,), (3, 4)),
        numbers((3, 4)),
    ]
    assert len(set(map(source.fingerprint, sources))) == len(sources)


def test_the_identity_of_many_files_is_folded(monkeypatch):
    monkeypatch.setattr(source, "_MAX_NAMED", 3)
    dataset = numbers(*[(1,)] * 5)
    (entry,) = source.identity(dataset)["files"]
    assert entry[:3] == ["numbers-0 and 4 more", 40, 5]
    assert len(source.identity(numbers(*[(1,)] * 3))["files"]) == 3
    # The fingerprint still depends on each file.
    moved = [(1,), (1,), (1,), (2,), (0,)]
    assert source.fingerprint(numbers(*moved)) != source.fingerprint(dataset)
