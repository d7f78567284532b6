import hypothesis
import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.training import step_record

IDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300)
RUNS = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63), st.integers(1, 20)
    ),
    min_size=1,
    max_size=20,
).map(lambda runs: [(a + n * d) % 2**64 for a, d, count in runs for n in range(count)])


def uint64(ids):
    return np.array(ids, np.uint64)


@hypothesis.given(IDS | RUNS)
def test_ids_that_are_listed_are_read_in_the_same_order(ids):
    items = step_record.encoded(uint64(ids))
    assert items is None or step_record.decoded(items) == tuple(ids)
    # So many ids fit, whatever they are.
    assert items is not None or len(ids) > step_record.MAX_ID_BYTES // 22


def test_ids_in_the_order_of_files_are_one_run_of_any_length():
    assert step_record.encoded(uint64(range(5, 10**6, 3))) == [[5, 333_332, 3]]


@hypothesis.given(st.integers(1, 5000), st.randoms(use_true_random=False))
def test_the_line_of_a_step_has_at_most_2000_bytes(num_rows, random):
    ids = uint64([random.getrandbits(64) for _ in range(num_rows)])
    rows = step_record.Rows(ids=ids, digests=np.zeros(num_rows))
    line = step_record.line(2**53, -1.2345678901234567e-300, rows, detail="proof")
    assert len(str(line)) <= 2000


def digests(ids, tokens):
    return step_record.BatchDigests.of_rows(
        step_record.Rows(ids=uint64(ids), digests=np.array(tokens, np.uint32))
    )


def blocks_that_differ(one, other):
    pairs = zip(one.block_digests, other.block_digests, strict=True)
    return [number for number, (a, b) in enumerate(pairs) if a != b]


def test_a_row_changes_the_digest_of_its_block_alone():
    ids, tokens = list(range(4096)), [7] * 4096
    before = digests(ids, tokens)
    assert len(before.block_digests) == 32
    ids[1300] = 99_999
    after = digests(ids, tokens)
    assert blocks_that_differ(before, after) == [1300 // 128]
    assert after.examples != before.examples
    assert after.contents != before.contents


def test_other_tokens_change_the_contents_and_not_the_examples():
    before, after = digests([1, 2, 3], [4, 5, 6]), digests([1, 2, 3], [4, 5, 7])
    assert after.examples == before.examples
    assert after.contents != before.contents
    assert blocks_that_differ(before, after) == [2]


def test_another_order_changes_the_digests_of_blocks_alone():
    ids, tokens = list(range(64)), list(range(64))
    before = digests(ids, tokens)
    ids[5], ids[4] = 4, 5
    tokens[5], tokens[4] = 4, 5
    after = digests(ids, tokens)
    assert (after.examples, after.contents) == (before.examples, before.contents)
    assert blocks_that_differ(before, after) == [2]


def test_a_block_has_the_same_digest_in_another_place():
    one = digests(range(64), range(64)).block_digests
    turned = [*range(10, 64), *range(10)]
    other = digests(turned, turned).block_digests
    assert other[0] == one[5]
