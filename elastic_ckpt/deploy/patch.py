"""Patches of objects: those of this package, and those of users for what no key covers.

A patch is a JSON merge patch (RFC 7386): mappings are merged, null removes a key, any
other value replaces. As in Kubernetes' strategic merge, lists whose members have a key
(containers have `name`, mounts `mountPath`, ports `containerPort`) are merged member by
member: a member with `$patch: delete` is removed, and a new one appended; a variable
(in `env`) replaces that of its name. Other lists are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_ckpt.core import errors
from elastic_ckpt.deploy.template import Object

_KEY = "manifest_patches"
_FIELDS = {"kind", "name", "patch"}
# The key of the members of a list, by the list's field; others have names.
_MEMBER_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}
_DIRECTIVE = "$patch"


def patched(documents: list[Object], patches: Sequence[Any]) -> list[Object]:
    """`documents` with `patches`, one after the other.

    Args:
      documents: of a manifest.
      patches: the value of the key `manifest_patches`.

    Raises:
      ConfigError: if a patch matches no document, or is malformed.
    """
    for number, each in enumerate(patches, 1):
        if (
            not isinstance(each, dict)
            or not {"kind", "patch"} <= each.keys() <= _FIELDS
        ):
            raise errors.ConfigError(
                f"patch {number} of {_KEY} is {each!r}; write {{kind: JobSet, patch:"
                " {spec: ...}}, and name: among several objects of a kind"
            )
        matching = [document for document in documents if _matches(each, document)]
        if not matching:
            present = [f"{d['kind']} {d['metadata']['name']}" for d in documents]
            name = f" {each['name']}" if "name" in each else ""
            raise errors.ConfigError(
                f"patch {number} of {_KEY} is for {each['kind']}{name}, which the"
                f" manifest does not have; it has {', '.join(present)}"
            )
        place = f"patch {number} of {_KEY}"
        documents = [
            merged(document, each["patch"], place) if document in matching else document
            for document in documents
        ]
    return documents


def _matches(patch: Object, document: Object) -> bool:
    name = document["metadata"]["name"]
    return patch["kind"] == document["kind"] and patch.get("name", name) == name


def merged(value: Any, patch: Any, place: str = "", field: str = "") -> Any:
    """`value`, which stays as it is, with `patch`.

    Args:
      value: an object, or a part of one.
      patch: of it.
      place: of the patch, for messages.
      field: of which this is the value.

    Raises:
      ConfigError: if the patch removes what is not there.
    """
    if isinstance(patch, dict):
        result = dict(value) if isinstance(value, dict) else {}
        for key, change in patch.items():
            below = f"{place}.{key}"
            if change is not None:
                result[key] = merged(result.get(key), change, below, key)
            elif key in result:
                del result[key]
            else:
                raise errors.ConfigError(f"{below} is null, but nothing is there")
        return result
    key = _MEMBER_KEYS.get(field, "name")
    if isinstance(patch, list) and _has_key(patch, key):
        return _merged_list(value or [], patch, key, place, field)
    return patch


def _has_key(members: list[Any], key: str) -> bool:
    return bool(members) and all(
        isinstance(member, dict) and key in member for member in members
    )


def _merged_list(
    value: list[Any], patch: list[Any], key: str, place: str, field: str
) -> list[Any]:
    result = list(value)
    for change in patch:
        names = [member.get(key) for member in result if isinstance(member, dict)]
        is_present = change[key] in names
        if change.get(_DIRECTIVE) == "delete":
            if not is_present:
                raise errors.ConfigError(
                    f"{place} deletes {change[key]!r}, which is not there; there are"
                    f" {names}"
                )
            result = [member for member in result if member.get(key) != change[key]]
        elif is_present:
            index = names.index(change[key])
            # A variable has a value or a source.
            present = {} if field == "env" else result[index]
            result[index] = merged(present, change, f"{place}[{change[key]}]")
        else:
            result.append(change)
    return result
