"""Calls and answers arrive as they were sent; a host runs those that are known."""

import dataclasses
import json
import typing

import pytest
from elastic_ckpt_sidecar import remote_hosts
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.checkpoint import hosts
from elastic_ckpt.core import calls, codec

# What both transports carry.
assert {hosts, remote_hosts}
CALLS = sorted(calls.known().values(), key=lambda call: call.name)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


def values(kind):
    """Random values of a declared type."""
    if kind is typing.Any:
        return JSON
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is not None and issubclass(origin, typing.Mapping):
        return st.dictionaries(st.text(), values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(values, arguments))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(
            kind,
            **{
                each.name: values(hints[each.name]) for each in dataclasses.fields(kind)
            },
        )
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is epath.Path:
        return st.sampled_from(["/run/steps/3", "gs://bucket/3"]).map(epath.Path)
    return st.from_type(kind)


def sent(encoded):
    return json.loads(json.dumps(encoded))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@given(data=st.data())
def test_calls_and_answers_arrive_as_they_were_sent(call, data):
    arguments = {
        name: data.draw(values(kind))
        for name, kind in call.hints.items()
        if name != "return"
    }
    assert calls.decode(sent(call.encode(arguments))) == (call, arguments)
    answer = data.draw(values(call.hints["return"]))
    received = call.decode_answer(sent(codec.encode(answer)))
    assert received == answer
    # Also the fields that an answer does not compare.
    assert repr(received) == repr(answer)


def test_hosts_have_calls_for_saves_copies_backups_and_restores():
    owners = {call.name.partition(".")[0] for call in CALLS}
    assert owners >= {"HostSaver", "HostCopies", "HostBackup", "HostReader"}


class Counter:
    """A part of a host, with a call and a method that is none."""

    @calls.call(channel="kind")
    def add(self, kind: str, numbers: tuple[int, ...] = (1,)) -> int:
        return len(kind) + sum(numbers)

    def reset(self):
        raise AssertionError


class Host:
    def part(self, name):
        return {"Counter": Counter()}[name]


def test_a_call_runs_on_the_part_of_its_class():
    call = calls.of(Counter.add)
    arguments = call.bind("ab", numbers=(3, 4))
    assert call.turn(arguments) == "Counter.add/ab"
    received, of_host = calls.decode(sent(call.encode(arguments)))
    assert received.run(Host(), of_host) == 9
    assert call.run(Host(), call.bind("ab")) == 3


@pytest.mark.parametrize("name", ["Counter.reset", "Counter.none", "Host.part"])
def test_what_is_no_call_is_not_run(name):
    with pytest.raises(KeyError, match=name):
        calls.decode({"call": name, "arguments": {}})


@pytest.mark.parametrize("arguments", [{"kind": 3}, {"kind": "a", "numbers": [True]}])
def test_arguments_of_another_type_are_refused(arguments):
    with pytest.raises(codec.DecodingError, match=r"Counter\.add\((kind|numbers)\)"):
        calls.decode({"call": "Counter.add", "arguments": arguments})


def test_a_wrong_number_of_arguments_is_the_error_of_the_caller():
    with pytest.raises(TypeError, match="missing a required argument: 'kind'"):
        calls.of(Counter.add).bind()
