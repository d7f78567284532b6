import json

from tests import runs


def test_it_says_who_reads_what_and_what_a_misfit_costs():
    output = runs.verb("plan", "--hosts", "3,5", "--batches", "24,8", "--shards", "12")
    few = "rows identical to those of one host; JAX needs a mesh that shards rows over"
    assert output == (
        "12 logical shards\n"
        "3 hosts, batches of 24: blocked, rows identical to those of one host\n"
        "  host 0 reads shards 0-3\n"
        "  host 2 reads shards 8-11\n"
        f"3 hosts, batches of 8: striped, {few} fewer than 3; 2 of the hosts load, 4"
        " rows each; 4 of 8 rows move between hosts' devices\n"
        "  host 0 reads shards 0, 2, 4, ... 6 in all\n"
        "  host 1 reads shards 1, 3, 5, ... 6 in all\n"
        f"5 hosts, batches of 24: blocked, {few} fewer than 5; 4 of the hosts load, 6"
        " rows each; 10 of 24 rows move between hosts' devices\n"
        "  host 0 reads shards 0-2\n"
        "  host 3 reads shards 9-11\n"
        f"5 hosts, batches of 8: striped, {few} fewer than 5; 4 of the hosts load, 2"
        " rows each; 7 of 8 rows move between hosts' devices\n"
        "  host 0 reads shards 0, 4, 8\n"
        "  host 3 reads shards 3, 7, 11\n"
    )


def test_without_shards_it_suggests_the_least():
    output = runs.verb("plan", "--hosts", "2,3,4", "--batches", "24,48", "--json")
    content = json.loads(output)
    assert content["num_shards"] == 12
    assert all(outlook["moved_rows"] == 0 for outlook in content["outlooks"])


def test_with_a_configuration_it_shows_the_data_and_takes_its_shards(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, num_logical_shards=6)
    output = runs.verb("plan", config, "--hosts", "2", "--batches", "12")
    lines = output.splitlines()
    assert lines[0] == "texts.array_record, 100.0%"
    assert lines[1].startswith("arrayrecord: 1 files, 1 blocks, 100 records, fingerp")
    assert "6 logical shards" in lines
    assert "2 hosts, batches of 12: blocked, rows identical to those of one host" in (
        lines
    )
