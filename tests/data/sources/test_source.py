from elastic_ckpt.data.sources import source
from tests import corpora

FOLDED = [["numbers-0 and 4 more", 40, 5]]


def numbers(*blocks):
    return corpora.Numbers(blocks=blocks)


def test_an_index_that_cannot_be_read_is_tried_again():
    tries = []

    class Unreliable(corpora.Numbers):
        def index(self, file):
            tries.append(file)
            if len(tries) <= 2:
                raise ConnectionError("reset by peer")
            return super().index(file)

    assert source.num_records(Unreliable(blocks=((3,),))) == 3
    assert tries == ["/data/numbers-0"] * 3


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
    actual = source.identity(dataset)["files"]
    assert [entry[:3] for entry in actual] == FOLDED
    assert len(source.identity(numbers(*[(1,)] * 3))["files"]) == 3
    # The fingerprint still depends on each file.
    moved = [(1,), (1,), (1,), (2,), (0,)]
    assert source.fingerprint(numbers(*moved)) != source.fingerprint(dataset)
