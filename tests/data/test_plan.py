import pytest

from elastic_ckpt.data import plan


def test_hosts_that_fit_read_their_own_shards_and_move_nothing():
    outlook = plan.outlook(12, 3, 24)
    assert (outlook.arrangement, outlook.loading_hosts) == ("blocked", 3)
    assert outlook.host_shards == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert (outlook.moved_rows, outlook.host_rows) == (0, 8)


def test_hosts_that_fit_the_shards_alone_exchange_rows():
    outlook = plan.outlook(12, 2, 8)
    assert (outlook.arrangement, outlook.loading_hosts) == ("striped", 2)
    assert outlook.host_shards == ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11))
    # Every second row of each half of the batch is loaded by the other host.
    assert (outlook.moved_rows, outlook.host_rows) == (4, 4)


def test_of_hosts_that_fit_neither_way_as_many_as_fit_load():
    outlook = plan.outlook(4, 3, 12, row_bytes=10)
    assert (outlook.arrangement, outlook.loading_hosts) == ("blocked", 2)
    assert outlook.host_shards == ((0, 1), (2, 3))
    # Rows 4 and 5 come from host 0, and rows 8 to 11 from host 1; rows 6 and 7 stay.
    assert (outlook.moved_rows, outlook.host_rows) == (6, 6)
    assert outlook.moved_bytes == 60


def test_three_hosts_of_sixty_four_shards():
    blocked, striped = (plan.outlook(64, 3, size) for size in (192, 48))
    assert (blocked.arrangement, blocked.loading_hosts) == ("blocked", 2)
    assert (blocked.host_rows, blocked.moved_rows) == (96, 96)
    assert (striped.arrangement, striped.loading_hosts) == ("striped", 2)
    assert (striped.host_rows, striped.moved_rows) == (24, 32)
    assert striped.moved_bytes is None


def test_hosts_that_do_not_divide_the_batch_leave_the_loading_to_fewer():
    outlook = plan.outlook(12, 5, 12)
    assert outlook.loading_hosts == 4
    # Hosts 0 to 3 load rows 0-2, 3-5, 6-8, 9-11; they keep 3, 2, 2 and 1 of them.
    assert outlook.moved_rows == 4


@pytest.mark.parametrize(("shards", "hosts", "size"), [(7, 4, 5), (1, 3, 2), (5, 2, 3)])
def test_one_host_can_always_load(shards, hosts, size):
    assert plan.outlook(shards, hosts, size).loading_hosts >= 1


def test_every_combination_is_there():
    outlook = plan.outlooks(12, [1, 4], [12, 24, 36])
    assert [(o.num_hosts, o.global_batch_size) for o in outlook] == [
        (h, size) for h in (1, 4) for size in (12, 24, 36)
    ]
