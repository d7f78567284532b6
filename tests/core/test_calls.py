"""Calls and answers arrive as they were sent; a host runs those that are known."""

import dataclasses
import json
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Mapping
from concurrent import futures

import pytest
from elastic_ckpt_sidecar import remote_hosts
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.checkpoint import hosts
from elastic_ckpt.core import calls, codec

# What both transports carry.
assert {hosts, remote_hosts}
CALLS = sorted(calls.BY_NAME.values(), key=lambda call: call.name)
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
    if origin is not None and issubclass(origin, typing.Mapping):
        return st.dictionaries(st.text(), values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(values, arguments))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        fields = typing.get_type_hints(kind).items()
        return st.builds(kind, **{name: values(hint) for name, hint in fields})
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is epath.Path:
        return st.sampled_from(["/run/steps/3", "gs://bucket/3"]).map(epath.Path)
    return st.from_type(kind)


def sent(encoded):
    return json.loads(json.dumps(encoded))


@settings(max_examples=8)
@given(data=st.data())
def test_calls_and_answers_arrive_as_they_were_sent(data):
    owners = {call.name.partition(".")[0] for call in CALLS}
    assert owners >= {"HostSaver", "HostCopies", "HostBackup", "HostReader"}
    for call in CALLS:
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


class Counter:
    """A role of a host, with a call and a method that is none."""

    @calls.call()
    def add(self, kind: str, numbers: tuple[int, ...] = (1,)) -> int:
        return len(kind) + sum(numbers)

    def reset(self):
        raise AssertionError


def test_a_call_runs_on_the_object_of_its_class_if_it_is_one_with_its_arguments():
    host = types.SimpleNamespace(role={"Counter": Counter()}.__getitem__)
    call = calls.of(Counter.add)
    arguments = call.bind("ab", numbers=(3, 4))
    received, of_host = calls.decode(sent(call.encode(arguments)))
    assert received.run(host, of_host) == 9
    assert call.run(host, call.bind("ab")) == 3
    with pytest.raises(TypeError, match="missing a required argument: 'kind'"):
        call.bind()
    for name in ("Counter.reset", "Counter.none", "Host.role"):
        with pytest.raises(KeyError, match=name):
            calls.decode({"call": name, "arguments": {}})
    for arguments in ({"kind": 3}, {"kind": "a", "numbers": [True]}):
        with pytest.raises(ValueError, match=r"Counter\.add\((kind|num)"):
            calls.decode({"call": "Counter.add", "arguments": arguments})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    path: epath.Path
    by_name: Mapping[str, tuple[int, ...]]


def test_values_are_encoded_and_refused_by_their_types():
    made = Known(path=epath.Path("/a"), by_name=types.MappingProxyType({"x": (1,)}))
    encoded = codec.encode(made)
    assert codec.decode(Known, sent(encoded)) == made
    with pytest.raises(TypeError, match="cannot be encoded"):
        codec.encode({"a": [object()]})
    for change, why in (
        (
            {"by_name": {"x": [True]}},
            r"int`, got `bool` - at `\$\.by_name\[\.\.\.\]\[0\]`",
        ),
        ({"path": 3}, "3 is not of type "),
    ):
        with pytest.raises(ValueError, match=f"^value: .*{why}"):
            codec.decode(Known, {**encoded, **change})


def decode_in_threads():
    """Decodes new types, each for the first time in several threads at once."""
    # Threads take turns as often as they can.
    sys.setswitchinterval(1e-6)
    encoded = {f"b{n}": {f"a{n}": n for n in range(20)} for n in range(10)}
    for _ in range(100):
        names = [f"a{n}" for n in range(20)]
        inner = dataclasses.make_dataclass("Inner", [(name, int) for name in names])
        outer = dataclasses.make_dataclass("Outer", [(name, inner) for name in encoded])
        expected = outer(**{name: inner(**each) for name, each in encoded.items()})
        together = threading.Barrier(8)

        def decode(_, outer=outer, together=together):
            together.wait()
            return codec.decode(outer, encoded)

        with futures.ThreadPoolExecutor(8) as threads:
            assert [*threads.map(decode, range(8))] == [expected] * 8


def test_a_type_is_decoded_for_the_first_time_in_several_threads():
    # The process would end with SIGSEGV.
    work = "from tests.core import test_calls; test_calls.decode_in_threads()"
    ended = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
