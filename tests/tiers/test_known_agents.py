"""Agents that machines have seen: the last state of each, for a limited time."""

import json

from elastic_ckpt.tiers.peers import known_agents

DAY = 24 * 3600.0
NOW = 1000 * DAY


def agent(url, days_ago=0):
    return {"url": url, "certificate_sha256": None, "seen": NOW - days_ago * DAY}


def test_what_is_noted_is_read_again_and_nothing_is_there_at_first(tmp_path):
    assert known_agents.read(tmp_path) == {}
    known_agents.write(tmp_path, {"m1": agent("http://a")})
    assert known_agents.read(tmp_path) == {"m1": agent("http://a")}


def test_an_agent_that_is_gone_is_forgotten(tmp_path):
    known_agents.forget(tmp_path, "http://a")
    known_agents.write(tmp_path, {"m1": agent("http://a"), "m2": agent("http://b")})
    known_agents.forget(tmp_path, "http://a")
    assert known_agents.read(tmp_path) == {"m2": agent("http://b")}


def test_a_spoilt_list_is_no_list(tmp_path):
    for text in ("", "[1]", "{"):
        (tmp_path / known_agents.FILE).write_text(text)
        assert known_agents.read(tmp_path) == {}


def test_a_spoilt_entry_is_left_out_beside_the_others(tmp_path):
    good = agent("http://10.0.0.7:8470")
    spoilt = [
        None,
        "http://a",
        {},
        {**good, "url": "a:1"},
        {**good, "url": "http://a:99999"},
        {**good, "url": None},
        {**good, "seen": "now"},
        {**good, "certificate_sha256": 7},
    ]
    agents = {f"m{number}": each for number, each in enumerate([*spoilt, good])}
    (tmp_path / known_agents.FILE).write_text(json.dumps(agents))
    assert known_agents.read(tmp_path) == {f"m{len(spoilt)}": good}


def test_of_an_agent_that_moved_the_last_place_counts():
    old, new = {"m1": agent("http://a", 3)}, {"m1": agent("http://b", 2)}
    for recorded in ([old, new], [new, old]):
        assert known_agents.joined(recorded, {}, now_secs=NOW) == new
    present = {"m1": {"url": "http://c", "certificate_sha256": None}}
    agents = known_agents.joined([old, new], present, now_secs=NOW)
    assert agents == {"m1": agent("http://c")}


def test_a_machine_that_is_away_for_two_weeks_is_forgotten():
    recorded = [{"m1": agent("http://a", 13), "m2": agent("http://b", 15)}]
    assert list(known_agents.joined(recorded, {}, now_secs=NOW)) == ["m1"]
