"""Files that Hugging Face writes beside weights: an index of them, and the sizes.

`model.safetensors.index.json` and `pytorch_model.bin.index.json` list the file of each
tensor. `config.json` has the sizes of the model; they are values,
`config/num_key_value_heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import bounded_json, plain_values, source_files
from elastic_ckpt.universal.formats.format_error import FormatError

CONFIG = "config.json"


def config_values(path: epath.Path) -> dict[str, Any]:
    """The values of a configuration, `config/...`; none if there is no such file.

    Raises:
      FormatError: if it is no JSON object.
    """
    if not path.exists():
        return {}
    return plain_values.flatten({"config": bounded_json.read(path)}, file=str(path))


def find_index(path: epath.Path, suffix: str, usual: str) -> epath.Path | None:
    """The index of a directory, or the file that is one; None if there is none.

    Args:
      path: of a directory, or of a file.
      suffix: with which the names of indices end.
      usual: the beginning of the name of the one that is taken of several.

    Raises:
      FormatError: if there are several.
    """
    if not path.is_dir():
        return path if path.name.endswith(suffix) else None
    names = [each.name for each in path.iterdir() if each.name.endswith(suffix)]
    if len(names) > 1 and usual + suffix not in names:
        raise FormatError(
            f"{path} has several indices ({errors.first_of(sorted(names))}); give the"
            " path of one of them"
        )
    if not names:
        return None
    return path / (usual + suffix if usual + suffix in names else names[0])


def read_index(index: epath.Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The tensors that each file has, and the numbers and texts of an index.

    Raises:
      FormatError: if it is none, or leads to another directory.
    """
    fields = bounded_json.read(index, tensors=index.parent)
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        held = by_file.get(file) if isinstance(file, str) else None
        if held is None:
            if not source_files.is_plain_name(file):
                shown = file[:200] if isinstance(file, str) else type(file)
                raise FormatError(
                    f"{index} lists {name[:200]} in {shown!r}, which is no file beside"
                    " it"
                )
            held = by_file[file] = []
        held.append(name)
    kept: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
    plain = {k: v for k, v in kept.items() if isinstance(v, str | int | float)}
    return dict(sorted(by_file.items())), plain
