"""The surface for users is frozen: a change shows up as a diff of a golden file."""

import argparse
import enum
import importlib
import inspect
import pathlib
import tomllib

from elastic_ckpt.cli import main
from elastic_ckpt.core import events, metrics
from elastic_ckpt.training import load, schema

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("elastic_ckpt", "elastic_ckpt_sidecar")
PUBLIC = [
    "elastic_ckpt",
    "elastic_ckpt.components",
    "elastic_ckpt.data",
    "elastic_ckpt.data.lm",
    "elastic_ckpt.elastic",
    "elastic_ckpt.integrations.orbax_v0",
    "elastic_ckpt.universal",
    "elastic_ckpt_sidecar",
]


def parameters(function):
    """Those that a caller can give; those without a default have no `=`."""
    names, star = [], False
    for each in inspect.signature(function).parameters.values():
        is_inner = each.kind is each.KEYWORD_ONLY and each.name.startswith("_")
        if each.name == "self" or is_inner:
            continue
        if each.kind is each.VAR_POSITIONAL:
            names.append(f"*{each.name}")
            star = True
        elif each.kind is each.VAR_KEYWORD:
            names.append(f"**{each.name}")
        else:
            if each.kind is each.KEYWORD_ONLY and not star:
                names.append("*")
                star = True
            names.append(each.name if each.default is each.empty else f"{each.name}=")
    return f"({', '.join(names)})"


def is_ours(value):
    return getattr(value, "__module__", "").startswith(PACKAGES)


def members(cls):
    """The public members of a class that this library has written."""
    for name in sorted(dir(cls)):
        value = inspect.getattr_static(cls, name)
        value = getattr(value, "__func__", value)
        if name.startswith("_"):
            continue
        if inspect.isfunction(value) and is_ours(value):
            yield f"{name}{parameters(value)}"
        elif isinstance(value, property) and is_ours(value.fget):
            yield name


def described(name, value):
    """The lines of a public name: with parameters, and members of a class."""
    if inspect.isclass(value) and is_ours(value):
        is_made = not (
            issubclass(value, Exception)
            or getattr(value, "_is_protocol", False)
            or issubclass(value, enum.Enum)
        )
        fields = [
            each
            for each in getattr(value, "__dataclass_fields__", {})
            if not each.startswith("_")
        ]
        own = dict.fromkeys([*fields, *members(value)])
        return [f"{name}{parameters(value) if is_made else ''}"] + [
            f"{name}.{each}" for each in own
        ]
    return [f"{name}{parameters(value)}" if inspect.isfunction(value) else name]


def test_public_names_with_their_parameters(golden):
    lines = []
    for module in PUBLIC:
        imported = importlib.import_module(module)
        for name in sorted(imported.__all__):
            full = f"{module}.{name}"
            # PyTorch is an extra.
            is_here = name != "TorchLoader"
            lines += described(full, getattr(imported, name)) if is_here else [full]
    golden("public_names.txt", "\n".join(lines) + "\n")


def test_command_line(golden):
    # Not argparse's own help text: its layout changes with the version of Python.
    lines = []
    (subparsers,) = (
        action
        for action in main.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for verb, parser in subparsers.choices.items():
        lines.append(f"{verb}: {parser.description}")
        for action in parser._actions:
            names = ", ".join(action.option_strings) or action.metavar or action.dest
            lines.append(f"  {names}: {action.help}")
    golden("command_line.txt", "\n".join(lines) + "\n")


def test_config_keys_with_meanings_and_defaults_are_those_of_base_yml(golden):
    base = ROOT / "configs" / "base.yml"
    golden(base, load.base_yaml())
    assert load.load(base) == schema.Config()


def test_event_names(golden):
    lines = [f"{name}: {', '.join(e.fields)}" for name, e in events.NAMES.items()]
    golden("events.txt", "\n".join(lines) + "\n")


def test_metric_names(golden):
    lines = [
        f"{metric.name}: {metric.kind}, {metric.unit}: {metric.meaning}"
        for metric in metrics.METRICS.values()
    ]
    golden("metrics.txt", "\n".join(lines) + "\n")


def test_every_key_of_every_shipped_configuration_has_a_comment_above_it():
    configs = ROOT / "configs"
    for path in {*configs.rglob("*.yml")} - {*configs.glob("layouts/*.yml")}:
        lines = path.read_text().splitlines()
        load.load(path)
        for above, line in zip(["", *lines], lines, strict=False):
            # The lines of a list or mapping belong to its key.
            if line and not line.startswith(("#", " ", "- ")):
                assert above.startswith("#"), f"{path.name}: {line}"


def test_the_constraints_are_those_that_uv_applies():
    pinned = {
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pinned == set(project["tool"]["uv"]["constraint-dependencies"])
