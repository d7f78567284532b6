"""Columns of integers are ordered and cut into runs as NumPy's own functions do it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from elastic_ckpt.core import columns


@given(
    np_st.arrays(
        np.int64,
        st.tuples(st.integers(1, 5), st.integers(0, 20)),
        elements=st.integers(0, 2) | st.integers(0, 2**62),
    )
)
def test_packed_columns_order_rows_as_the_columns_do(listed):
    packed = columns.packed(*listed)
    np.testing.assert_array_equal(np.lexsort(packed[::-1]), np.lexsort(listed[::-1]))
    rows = {tuple(row) for row in listed.T.tolist()}
    assert len({tuple(row) for row in np.array(packed).T.tolist()}) == len(rows)


@given(
    np_st.arrays(
        np.int64,
        st.tuples(st.integers(0, 20), st.integers(0, 5)),
        elements=st.integers(-2, 2) | st.integers(-(2**61), 2**61),
    )
)
def test_distinct_rows_are_found_in_order_with_the_first_of_each(rows):
    firsts, number = columns.distinct_rows(rows)
    listed = [tuple(row) for row in rows.tolist()]
    assert firsts.tolist() == [*map(listed.index, sorted({*listed}))]
    assert [listed[firsts[each]] for each in number.tolist()] == listed
