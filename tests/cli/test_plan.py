import json

import pytest

from tests import runs


def test_it_says_who_reads_what_and_what_a_misfit_costs():
    output = runs.verb("plan", "--hosts", "3,5", "--batches", "24,8", "--shards", "12")
    assert output == (
        "12 logical shards\n"
        "3 hosts, batches of 24: blocked, rows identical to those of one host\n"
        "  host 0 reads shards 0-3\n"
        "  host 2 reads shards 8-11\n"
        "3 hosts, batches of 8: do not fit; 2 of them can load (striped), and 4 of 8"
        " rows have to be handed on\n"
        "  host 0 reads shards 0, 2, 4, ... 6 in all\n"
        "  host 1 reads shards 1, 3, 5, ... 6 in all\n"
        "5 hosts, batches of 24: do not fit; 4 of them can load (blocked), and 10 of 24"
        " rows have to be handed on\n"
        "  host 0 reads shards 0-2\n"
        "  host 3 reads shards 9-11\n"
        "5 hosts, batches of 8: do not fit; 4 of them can load (striped), and 7 of 8"
        " rows have to be handed on\n"
        "  host 0 reads shards 0, 4, 8\n"
        "  host 3 reads shards 3, 7, 11\n"
    )


def test_without_shards_it_suggests_the_least():
    output = runs.verb("plan", "--hosts", "2,3,4", "--batches", "24,48", "--json")
    content = json.loads(output)
    assert content["num_shards"] == 12
    assert all(outlook["rows_identical"] for outlook in content["outlooks"])


@pytest.mark.parametrize("hosts", ["", "two", "0", "2,,3"])
def test_what_is_no_list_of_numbers_is_refused(hosts):
    output = runs.verb("plan", "--hosts", hosts, "--batches", "8", code=1)
    assert "--hosts" in output
    assert "write whole numbers" in output
