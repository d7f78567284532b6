"""Each world of a run belongs to one start: the first that creates its record."""

import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps import line
from elastic_ckpt.tiers.persistent import claims

A = claims.Claimant(name="a")
B = claims.Claimant(name="b")
A_AGAIN = claims.Claimant(name="a", has_claimed=True)


def line_of(save):
    return line.Line(save=save, parents=((40, "7"),))


def claim(steps, save, claimant=A):
    return claims.claim(steps, line_of(save), run="tiny", claimant=claimant)


@pytest.fixture(params=["local", "gs", "s3"])
def steps(request, steps_in):
    """The directory of a run's steps, on a disk or in a bucket."""
    return steps_in(request.param)


def test_a_replaced_start_claims_and_commits_no_more(steps):
    assert claims.newest(steps) is None
    first = claim(steps, "8")
    assert claims.newest(steps) == first
    claims.check(steps, first)
    second = claim(steps, "9", B)
    assert claims.newest(steps) == second
    assert [first.number, second.number] == [1, 2]
    with pytest.raises(errors.ReplacedError, match="b, has continued it as world 2"):
        claims.check(steps, first)
    assert claims.is_replaced(steps, 1)
    assert not claims.is_replaced(steps, 2)
    # Its clock may be ahead.
    with pytest.raises(errors.ReplacedError, match="world 2"):
        claim(steps, "99", A_AGAIN)
    claims.check(steps, second)


def test_a_start_claims_each_of_its_worlds(tmp_path):
    first, second = claim(tmp_path, "8"), claim(tmp_path, "9", A_AGAIN)
    assert [first.number, second.number] == [1, 2]
    assert not claims.is_replaced(tmp_path, 1)
    # Another start, which has claimed nothing yet, takes the run over.
    assert claim(tmp_path, "95", B).number == 3


def test_a_start_whose_search_was_before_another_claim_has_lost(tmp_path):
    claim(tmp_path, "8", B)
    with pytest.raises(errors.ReplacedError, match="b, has continued it as world 1"):
        claim(tmp_path, "8", A)


def test_one_of_two_simultaneous_claims_wins(tmp_path, monkeypatch):
    create = storage.create

    def late(path, content):
        monkeypatch.undo()
        claim(tmp_path, "8", B)
        return create(path, content)

    monkeypatch.setattr(storage, "create", late)
    with pytest.raises(errors.ReplacedError, match="b, has continued it as world 1"):
        claim(tmp_path, "9", A)
    assert claims.newest(tmp_path).claimant == "b"


def test_a_client_that_repeats_its_request_has_claimed_the_world(tmp_path, monkeypatch):
    create = storage.create

    def twice(path, content):
        create(path, content)
        return create(path, content)

    monkeypatch.setattr(storage, "create", twice)
    assert claim(tmp_path, "8") == claims.newest(tmp_path)


def test_a_claim_whose_answer_was_lost_is_that_of_its_start(tmp_path, monkeypatch):
    create, first = storage.create, claim(tmp_path, "8")

    def lose(path, content):
        create(path, content)
        raise OSError(5, "the answer is lost", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", lose)
        with pytest.raises(errors.CheckpointError, match="out of reach"):
            claim(tmp_path, "9", A_AGAIN)
    second = claims.check(tmp_path, first, line_of("9"))
    assert (second.number, second) == (2, claims.newest(tmp_path))
    # Another world of the start has another line.
    for other in (None, line_of("8")):
        with pytest.raises(errors.ReplacedError, match="a, has continued it as world"):
            claims.check(tmp_path, first, other)
    claim(tmp_path, "95", B)
    with pytest.raises(errors.ReplacedError, match="b, has continued it as world 3"):
        claims.check(tmp_path, first, line_of("9"))


def test_a_damaged_claim_is_an_error_that_names_it(tmp_path):
    claim(tmp_path, "8")
    path = tmp_path / claims.DIRECTORY / "1.json"
    path.write_bytes(path.read_bytes().replace(b'"claimant": "a"', b'"claimant": "b"'))
    with pytest.raises(errors.CheckpointError, match=r"1\.json was altered"):
        claims.newest(tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"1\.json was altered"):
        claim(tmp_path, "9")


def test_storage_out_of_reach_is_an_error_and_no_claim(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CheckpointError, match="out of reach"):
        claim(tmp_path / "file", "8")


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_list_that_lags_hides_no_claim(bucket, monkeypatch):
    for save in ("5", "6", "7"):
        newest = claim(bucket, save)
    monkeypatch.setattr(claims, "numbers", lambda _: [1])
    assert claims.newest(bucket) == newest
