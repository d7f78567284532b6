"""The elements that pieces fill are described by their steps, however many they are."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.plan import cover


@given(
    factors=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 1), st.integers(1, 12)), max_size=4
    )
)
def test_distinct_boxes_are_those_whose_indices_are_intervals(factors):
    sizes, dims, steps = zip(*factors, strict=True) if factors else ((), (), ())
    image = cover.Image.from_factors(sizes, dims, steps)
    listed = [image.indices(dim).tolist() for dim in range(2)]
    assert image.distinct == all(len(set(each)) == len(each) for each in listed)
    lengths = [len(each) for each in listed]
    are_intervals = all(each == list(range(len(each))) for each in listed)
    assert image.lengths(2) == (lengths if are_intervals else None)


def test_a_dim_of_more_indices_than_memory_has_room_is_described():
    image = cover.Image.from_factors((1 << 30, 1 << 20), (0, 0), (1 << 20, 1))
    assert image.distinct
    assert image.lengths(1) == [1 << 50]
