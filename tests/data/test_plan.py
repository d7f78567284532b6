import pytest

from elastic_ckpt.data import plan


def test_hosts_that_fit_read_their_own_shards_and_move_nothing():
    outlook = plan.outlook(12, 3, 24)
    assert (outlook.arrangement, outlook.loading_hosts) == ("blocked", 3)
    assert outlook.host_shards == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert (outlook.moved_rows, outlook.host_rows) == (0, 8)


def test_of_hosts_that_fit_neither_way_as_many_as_fit_load():
    outlook = plan.outlook(4, 3, 12, row_bytes=10)
    assert (outlook.arrangement, outlook.loading_hosts) == ("blocked", 2)
    assert outlook.host_shards == ((0, 1), (2, 3))
    # Rows 4 and 5 come from host 0, and rows 8 to 11 from host 1; rows 6 and 7 stay.
    assert (outlook.moved_rows, outlook.host_rows) == (6, 6)
    assert outlook.moved_bytes == 60


@pytest.mark.parametrize(("shards", "hosts", "size"), [(7, 4, 5), (1, 3, 2), (5, 2, 3)])
def test_one_host_can_always_load(shards, hosts, size):
    assert plan.outlook(shards, hosts, size).loading_hosts >= 1


def test_every_combination_is_there():
    outlook = plan.outlooks(12, [1, 4], [12, 24, 36])
    assert [(o.num_hosts, o.global_batch_size) for o in outlook] == [
        (h, size) for h in (1, 4) for size in (12, 24, 36)
    ]
