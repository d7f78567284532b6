import json

from tests import runs


def test_it_says_who_reads_what_and_what_a_misfit_costs():
    output = runs.verb("plan", "--hosts", "3,5", "--batches", "24,8", "--shards", "12")
    few = "JAX needs a mesh that shards rows over fewer than"
    assert output == (
        "12 logical shards\n"
        "3 hosts, batches of 24: shards are read 1 times\n"
        "  host 0 reads shards 0-3\n"
        "  host 2 reads shards 8-11\n"
        f"3 hosts, batches of 8: shards are read 1.25 times; {few} 3 hosts\n"
        "  host 0 reads shards 0-5\n"
        "  host 2 reads shards 9-11\n"
        f"5 hosts, batches of 24: shards are read 1.17 times; {few} 5 hosts\n"
        "  host 0 reads shards 0-2\n"
        "  host 4 reads shards 10-11\n"
        f"5 hosts, batches of 8: shards are read 1.5 times; {few} 5 hosts\n"
        "  host 0 reads shards 0-2\n"
        "  host 4 reads shards 9-11\n"
    )


def test_without_shards_it_suggests_the_least():
    output = runs.verb("plan", "--hosts", "2,3,4", "--batches", "24,48", "--json")
    content = json.loads(output)
    assert content["num_shards"] == 12
    assert all(outlook["shard_reads"] == 1 for outlook in content["outlooks"])


def test_with_a_configuration_it_shows_the_data_and_takes_its_shards(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, num_logical_shards=6)
    output = runs.verb("plan", config, "--hosts", "2", "--batches", "12")
    lines = output.splitlines()
    assert lines[0] == "texts.array_record, 100.0%"
    assert lines[1].startswith("arrayrecord: 1 files, 1 blocks, 100 records, fingerp")
    assert "6 logical shards" in lines
    assert "2 hosts, batches of 12: shards are read 1 times" in lines
