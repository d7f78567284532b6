"""Tables of parts give the manifests that they were made of, also as messages."""

import dataclasses

import numpy as np
import pytest

from elastic_ckpt.core import checked_json, digest
from elastic_ckpt.steps import manifest_file, part_message, part_table
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from tests.steps import test_search


def manifests(**options):
    return [offer.manifest for offer in test_search.four(**options)]


def tables(listed):
    offers = [Offer(tier="local", manifest=each) for each in listed]
    return part_table.joined([PartTable.from_offer(offer) for offer in offers])


def without_places(manifest):
    """The bytes of a manifest whose fragments are in no file."""
    fragments = dataclasses.replace(
        manifest.fragments,
        file=np.zeros(len(manifest.fragments), np.int32),
        offset=np.zeros(len(manifest.fragments), np.int64),
        files=("",),
    )
    return manifest_file.to_bytes(dataclasses.replace(manifest, fragments=fragments))


def as_bytes(listed):
    return [without_places(each) for each in listed]


def sent(message):
    return part_message.parse(part_message.to_bytes(message))


def test_a_joined_table_lists_what_each_holder_lists():
    listed = manifests()
    (table,) = tables(listed)
    assert as_bytes(table.manifests()) == as_bytes(listed)


def test_a_message_has_the_tables_and_problems_that_were_sent():
    of_both = tables([*manifests(save="1"), *manifests(save="2")])
    message = sent(PartMessage(tables=tuple(of_both), problems=("lost",)))
    assert [each.saved.step_id.save for each in message.tables] == ["1", "2"]
    for number, table in enumerate(message.tables, start=1):
        expected = as_bytes(manifests(save=str(number)))
        assert as_bytes(table.manifests()) == expected
    assert message.problems == ("lost",)


def test_parts_for_a_host_are_those_with_its_number_at_their_holders():
    listed = manifests()
    (table,) = tables(listed)
    rows = np.array([0, 0, 3])
    target = np.array([5, 6, 6], np.int32)
    given = table.take(rows, [], target=target)
    group = np.where(np.isin(np.arange(10), [6, 9]), 0, -1)
    (of_group,) = given.for_groups(group, 1)
    (for_six,) = sent(PartMessage(tables=(of_group,))).tables
    assert len(for_six) == 2
    assert set(for_six.target.tolist()) == {6}
    assert {each.host.id for each in for_six.holders} == {
        table.holders[number].host.id for number in table.holder[[0, 3]]
    }
    np.testing.assert_array_equal(for_six.digest, table.digest[[0, 3]])


def test_parts_for_all_hosts_are_in_each_group_and_those_of_unknown_hosts_in_none():
    (table,) = tables(manifests())
    target = np.array([part_table.ALL_HOSTS, part_table.NO_TARGET, 0, 1, 2], np.int32)
    file = table.files[0]
    files = [file._replace(target=number) for number in target.tolist()]
    given = table.take(np.arange(5), files, target=target)
    groups = given.for_groups(np.array([1, 0]), 2)
    for host, part in zip((1, 0), groups, strict=True):
        wanted = [host, part_table.ALL_HOSTS]
        assert part.target.tolist() == wanted
        assert {each.target for each in part.files} == set(wanted)


def sealed(content):
    return content + digest.values_digest(np.frombuffer(content, np.uint8))


def test_a_message_that_was_altered_is_refused():
    (table,) = tables(manifests())
    content = part_message.to_bytes(PartMessage(tables=(table,)))
    outside = dataclasses.replace(
        table, boxes=dataclasses.replace(table.boxes, stop=table.boxes.stop + 10**6)
    )
    for spoilt in (
        content[:-1],
        b"",
        content[:40] + b"?" + content[41:],
        sealed(content[:-20]),
        sealed(content[:-16].replace(b'"num_rows":', b'"num_rows":9')),
        sealed(content[:-16].replace(b"data/", b"/etc/")),
        sealed(b"\xff" * 8 + content[8:-16]),
        part_message.to_bytes(PartMessage(tables=(outside,))),
    ):
        with pytest.raises(checked_json.UnreadableError):
            part_message.parse(spoilt)
