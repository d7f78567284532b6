"""Requests and answers arrive as they were sent, and each is in the table once."""

import dataclasses
import importlib
import json
import pkgutil
import typing

import pytest
from elastic_ckpt_sidecar import array_requests
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

import elastic_ckpt.host
from elastic_ckpt.core import codec
from elastic_ckpt.host import phases

MODULES = [
    *(
        f"elastic_ckpt.host.{module.name}"
        for module in pkgutil.iter_modules(elastic_ckpt.host.__path__)
        if module.name.endswith("_requests")
    ),
    array_requests.__name__,
]
PHASES = array_requests.COLOCATED_PHASES
KINDS = sorted(PHASES.limits_secs, key=lambda kind: kind.__name__)
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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_requests_and_answers_arrive_as_they_were_sent(kind, data):
    request = data.draw(values(kind))
    assert PHASES.decode(sent(PHASES.encode(request))) == request
    answer = data.draw(values(typing.get_type_hints(kind.run)["return"]))
    received = phases.decode_answer(request, sent(codec.encode(answer)))
    assert received == answer
    # Also the fields that an answer does not compare.
    assert repr(received) == repr(answer)


def test_each_request_is_in_the_table_with_a_time_limit():
    defined = {
        kind
        for name in MODULES
        for kind in vars(importlib.import_module(name)).values()
        if isinstance(kind, type) and kind.__module__ == name and hasattr(kind, "run")
    }
    assert defined == set(KINDS)
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS)
    assert all(limit > 0 for limit in PHASES.limits_secs.values())


def test_requests_are_frozen_and_take_keywords_alone():
    for kind in KINDS:
        assert kind.__dataclass_params__.frozen
        assert all(field.kw_only for field in dataclasses.fields(kind))


def test_an_unknown_request_is_refused():
    with pytest.raises(KeyError):
        phases.PHASES.decode({"request": "PutFiles", "fields": {}})
