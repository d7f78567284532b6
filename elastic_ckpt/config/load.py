"""Reads a configuration: a YAML file, its base files, and overrides.

It is strict: an unknown key, a key set twice or a value of a wrong type is an error,
which names the file and line and, for an unknown key, the nearest existing key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import typing
from collections.abc import Collection, Sequence

import yaml
from etils import epath

from elastic_ckpt.config import keys, schema
from elastic_ckpt.config.key import Value
from elastic_ckpt.core import bucket_clients, errors, storage

# The base with every key's default, which need not exist as a file.
DEFAULTS = "base.yml"

_INHERIT = "base_config"


class Loader(yaml.SafeLoader):
    """Reads `12:00:00` as text, which YAML 1.1 takes for a number of base 60."""

    def resolve(
        self, kind: type[yaml.Node], value: str | None, implicit: object
    ) -> str:
        """The tag of a node without one."""
        tag: str = super().resolve(kind, value, implicit)
        if tag in _NUMBERS and ":" in str(value):
            return str(self.DEFAULT_SCALAR_TAG)
        return tag


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
    value: object
    place: str


def load(path: epath.PathLike, overrides: Sequence[str] = ()) -> schema.Config:
    """The configuration in `path`, with `overrides` on top.

    Args:
      path: a YAML file of `key: value` lines, local or in a bucket; `base_config:`
        names another file, relative to this one, for the settings that this one lacks.
        `base_config: base.yml` means the defaults if there is no such file.
      overrides: `key=value` texts, as on a command line; later ones take precedence.

    Raises:
      ConfigError: names the file and line (or the override) and the remedy.
    """
    return _build(_settings(path, overrides))


def of_keys(
    wanted: Collection[str],
    path: epath.PathLike | None,
    overrides: Sequence[str] = (),
) -> tuple[schema.Config, dict[str, object]]:
    """The configuration of some keys, in a file that has those of another program too.

    Args:
      wanted: the keys; others are left alone.
      path: as in `load`; None if there are overrides alone.
      overrides: as in `load`.

    Returns:
      The configuration, and the value of each wanted key that is set, and not to null.

    Raises:
      ConfigError: as in `load`.
    """
    settings = _settings(path, overrides)
    chosen = {
        key: each
        for key, each in settings.items()
        if key in wanted and each.value is not None
    }
    known = keys.keys()
    config = _build({key: each for key, each in chosen.items() if key in known})
    return config, {key: each.value for key, each in chosen.items()}


def origins(path: epath.PathLike, overrides: Sequence[str] = ()) -> dict[str, str]:
    """The origin of each key that is set: file and line, or the override.

    Raises:
      ConfigError: as in `load`, except for unknown keys and invalid values, which only
        `load` checks.
    """
    settings = _settings(path, overrides)
    return {key: setting.place for key, setting in settings.items()}


def _settings(
    path: epath.PathLike | None, overrides: Sequence[str]
) -> dict[str, _Setting]:
    settings = {} if path is None else _read_file(storage.absolute(path), below=())
    for override in overrides:
        key, equals, text = override.partition("=")
        place = f"command line, {override!r}"
        if not equals:
            raise errors.ConfigError(f"{place}: write it as key=value")
        try:
            value = Loader(text).get_single_data() if text else ""
        except yaml.YAMLError:
            value = text
        settings[key] = _Setting(value=value, place=place)
    return settings


def from_values(values: dict[str, Value], *, place: str) -> schema.Config:
    """The configuration with `values`, which `keys.values` made.

    Args:
      values: the value of each key.
      place: the origin of every key, for messages.

    Raises:
      ConfigError: if a key is unknown or a value is invalid.
    """
    return _build({k: _Setting(value=v, place=place) for k, v in values.items()})


def stages(section: schema.DataSection) -> list[tuple[int, schema.DataSection]]:
    """The stages of the data: the step at which each begins, and its keys.

    Without `data_stages` there is one.

    Raises:
      ConfigError: if the file cannot be read, or a stage is invalid; names it.
    """
    if not section.data_stages:
        return [(0, section)]
    text = section.data_stages
    if text.lstrip().startswith("["):
        path = _STAGES
        try:
            document = yaml.compose(text, Loader)
        except yaml.YAMLError as error:
            raise errors.ConfigError(f"{path}: not valid YAML: {error}") from None
    else:
        path = storage.absolute(text)
        document = _composed(path, by=f" ({_STAGES})")
    form = "a list of stages: `- begin_step: 0` and, below it, keys that it sets"
    if not isinstance(document, yaml.SequenceNode) or not document.value:
        raise errors.ConfigError(f"{path}: write {form}")
    found = []
    for number, node in enumerate(document.value):
        place = f"{path}, stage {number}"
        if not isinstance(node, yaml.MappingNode):
            raise errors.ConfigError(f"{place}: write {form}")
        settings = _mapping(path, node)
        begin = settings.pop(_BEGIN, None)
        if begin is None or type(begin.value) is not int or begin.value < 0:
            raise errors.ConfigError(
                f"{place}: the stage has no {_BEGIN}, the training step at which it"
                " begins; give it a number from 0"
            )
        own = {field.name for field in dataclasses.fields(section)}
        wrong = sorted(
            (settings.keys() & keys.keys().keys() - own) | _OF_ALL_STAGES & {*settings}
        )
        if wrong:
            raise errors.ConfigError(
                f"{settings[wrong[0]].place}: {wrong[0]} is not a key that a stage can"
                " have; set it for the whole run"
            )
        whole = {
            name: _Setting(value=value, place=place)
            for name, value in vars(section).items()
        }
        found.append((begin.value, _build(whole | settings).data))
    return found


_STAGES = "data_stages"
# The field of a stage with its first step.
_BEGIN = "begin_step"
# Keys of the data that no stage has for itself.
_OF_ALL_STAGES = {
    "data_stages",
    "enable_rampup_batch_size",
    "num_logical_shards",
}


def _read_file(
    path: epath.Path, *, below: tuple[epath.Path, ...]
) -> dict[str, _Setting]:
    if storage.is_local(path):
        path = epath.Path(os.path.realpath(path))
    else:
        # Names of objects have no `..`.
        store, _, name = os.fspath(path).partition("://")
        path = epath.Path(f"{store}://{os.path.normpath(name)}")
    if path in below:
        raise errors.ConfigError(
            f"{path}: base_config includes this file again; remove it from one of the"
            " files"
        )
    by = f" (base_config of {below[-1]})" if below else ""
    document = _composed(path, by=by)
    if document is None:
        return {}
    if not isinstance(document, yaml.MappingNode):
        raise errors.ConfigError(f"{path}, line 1: expected lines of `key: value`")
    settings = _mapping(path, document)
    base = settings.pop(_INHERIT, None)
    if base is None:
        return settings
    below_this = path.parent / str(base.value)
    if base.value == DEFAULTS and not below_this.exists():
        # An installed package has no configs/base.yml; it only lists the defaults.
        return settings
    return _read_file(below_this, below=(*below, path)) | settings


def _composed(path: epath.Path, *, by: str) -> yaml.Node | None:
    # The document of a YAML file, which `by` tells who named.
    try:
        return yaml.compose(path.read_text(), Loader)
    except FileNotFoundError:
        raise errors.ConfigError(f"{path}: no such configuration file{by}") from None
    except (UnicodeDecodeError, *bucket_clients.failures()) as error:
        raise errors.ConfigError(
            f"{path}: this file cannot be read: {error}; check"
            " the path and its permissions"
        ) from None
    except yaml.YAMLError as error:
        raise errors.ConfigError(
            f"{path}: this file is not valid YAML: {error}"
        ) from None


def _mapping(path: epath.PathLike, document: yaml.MappingNode) -> dict[str, _Setting]:
    # The keys of a mapping of a YAML file, and their places.
    settings: dict[str, _Setting] = {}
    constructor = Loader("")
    for key_node, value_node in document.value:
        key = str(key_node.value)
        place = f"{path}, line {key_node.start_mark.line + 1}"
        if key in settings:
            first = settings[key].place.rpartition(" ")[2]
            raise errors.ConfigError(
                f"{place}: {key} is already set in line {first}; remove one of them"
            )
        try:
            value = constructor.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            raise errors.ConfigError(
                f"{place}: {key} cannot be read: {error}"
            ) from None
        settings[key] = _Setting(value=value, place=place)
    return settings


def _build(settings: dict[str, _Setting]) -> schema.Config:
    known = keys.keys()
    chosen: dict[str, dict[str, Value]] = {}
    for key, setting in settings.items():
        if key not in known:
            near = difflib.get_close_matches(key, [*known, _INHERIT], n=1, cutoff=0.0)
            raise errors.ConfigError(
                f"{setting.place}: unknown key {key!r}; the nearest key is {near[0]!r}"
            )
        section, field = known[key]
        chosen.setdefault(section, {})[key] = _coerce(key, field, setting)
    return schema.Config(
        **{
            name: dataclasses.replace(section, **chosen.get(name, {}))
            for name, section in keys.sections().items()
        }
    )


def _coerce(key: str, field: dataclasses.Field[object], setting: _Setting) -> Value:
    expected = type(field.default)
    value = setting.value
    if (
        expected is float
        and isinstance(value, (int, str))
        and not isinstance(value, bool)
    ):
        # YAML 1.1 reads `1e-3` as a string.
        with contextlib.suppress(ValueError):
            value = float(value)
    if expected is str and value is None:
        value = ""
    lists = field.metadata["lists"]
    if lists == "names" and isinstance(value, list):
        value = _joined(value)
    if isinstance(value, _KEPT_AS_JSON.get(lists, ())):
        # Values that JSON lacks, such as dates, are their texts.
        value = json.dumps(value, default=str)
    off = field.metadata["off"]
    if off is not None and type(value) is int and value == off:
        value = field.default
    choices = field.metadata["choices"]
    if isinstance(value, bool):
        # YAML 1.1 reads `off` and `on` as booleans.
        texts = _BOOLEAN_TEXTS[value]
        value = next((each for each in choices if each in texts), value)
    if type(value) is not expected:
        quoted = f'; put it in quotes ({key}: "{setting.value}")'
        is_number = expected is str and isinstance(value, int | float)
        raise errors.ConfigError(
            f"{setting.place}: {key} must be {_ARTICLES[expected]}, not"
            f" {setting.value!r}{quoted if is_number else ''}"
        )
    if choices and value not in choices:
        allowed = ", ".join(keys.render(choice) for choice in choices)
        raise errors.ConfigError(
            f"{setting.place}: {key} must be one of {allowed}, not {setting.value!r}"
        )
    at_least = field.metadata["at_least"]
    if at_least is not None and not typing.cast(float, value) >= at_least:
        raise errors.ConfigError(
            f"{setting.place}: {key} must be at least {at_least}, not {setting.value!r}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise errors.ConfigError(
            f"{setting.place}: {key} must be a finite number, not {setting.value!r}"
        )
    below = field.metadata["below"]
    if below is not None and not typing.cast(float, value) < below:
        raise errors.ConfigError(
            f"{setting.place}: {key} must be below {below}, not {setting.value!r}"
        )
    factor = field.metadata["multiple_of"]
    if factor is not None and typing.cast(int, value) % factor:
        raise errors.ConfigError(
            f"{setting.place}: {key} must be a multiple of {factor}, not"
            f" {setting.value!r}"
        )
    return typing.cast(Value, value)


def _joined(names: list[object]) -> object:
    # The names that a list has, as a text; the list if these are no names.
    texts = [name for name in names if isinstance(name, str)]
    return ",".join(texts) if names and texts == names else names


_BOOLEAN_TEXTS = {False: ("off", "no", "false"), True: ("on", "yes", "true")}
_KEPT_AS_JSON: dict[str, tuple[type, ...]] = {"any": (list,), "yaml": (list, dict)}
_ARTICLES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
