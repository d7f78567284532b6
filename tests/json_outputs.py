"""Compares what verbs print with `--json` with the fields that they promise."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence

from docs import json_fields
from elastic_ckpt.core import storage


def check(verb: str, text: str) -> None:
    """Fails unless `text` is what a call of the verb promises to print."""
    content = json.loads(text)
    found = {}
    for call, classes in json_fields.OUTPUTS.items():
        if call.split()[0] == verb:
            items = content if call in json_fields.LISTS else [content]
            found[call] = [
                each for item in items for each in _of_object(item, classes, "")
            ]
    assert found, f"docs/json_fields.py does not know what {verb} --json prints"
    assert not all(found.values()), f"--json differs from docs/json_fields.py: {found}"


def _of_object(value, classes, path):
    hints = {}
    for cls in classes:
        hints |= typing.get_type_hints(cls)
    needed = {
        field.name
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
    }
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no object"]
    return [
        *(f"{path}.{name} is missing" for name in needed - value.keys()),
        *(f"{path}.{name} is unknown" for name in value.keys() - hints.keys()),
        *(
            problem
            for name in value.keys() & hints.keys()
            for problem in _differences(value[name], hints[name], f"{path}.{name}")
        ),
    ]


def _differences(value, annotation, path):
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (typing.Any, storage.Json):
        return []
    if dataclasses.is_dataclass(annotation):
        return _of_object(value, [annotation], path)
    if origin in (typing.Union, types.UnionType):
        return min((_differences(value, each, path) for each in arguments), key=len)
    if origin is typing.Literal:
        return [] if value in arguments else [f"{path}: {value!r}"]
    if origin in (tuple, Sequence) and isinstance(value, list):
        kinds = arguments
        if origin is Sequence or Ellipsis in arguments:
            kinds = arguments[:1] * len(value)
        pairs = zip(value, kinds, strict=True)
        return [each for item in pairs for each in _differences(*item, f"{path}[]")]
    if origin in (dict, Mapping) and isinstance(value, dict):
        items = [(each, arguments[1]) for each in value.values()]
        return [each for item in items for each in _differences(*item, f"{path}.*")]
    wanted = (int, float) if annotation is float else annotation
    is_right = origin is None and isinstance(value, wanted)
    is_right &= isinstance(value, bool) == (annotation is bool)
    return [] if is_right else [f"{path}: {value!r} is no {annotation}"]
