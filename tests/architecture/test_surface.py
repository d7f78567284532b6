"""The surface for users is frozen: a change shows up as a diff of a golden file."""

import argparse
import importlib
import pathlib
import tomllib

from elastic_ckpt.cli import main
from elastic_ckpt.config import keys, load, schema
from elastic_ckpt.core import events, metrics

ROOT = pathlib.Path(__file__).parents[2]
PUBLIC = [
    "elastic_ckpt",
    "elastic_ckpt.components",
    "elastic_ckpt.data",
    "elastic_ckpt.elastic",
    "elastic_ckpt.integrations.orbax_v0",
    "elastic_ckpt.universal",
    "elastic_ckpt_sidecar",
]


def test_public_names(golden):
    lines = [
        f"{module}.{name}"
        for module in PUBLIC
        for name in sorted(importlib.import_module(module).__all__)
    ]
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


def test_config_keys_with_meanings_and_defaults_are_those_of_base_yml(request):
    base = ROOT / "configs" / "base.yml"
    if request.config.getoption("--update-golden"):
        base.write_text(keys.base_yaml())
    assert base.read_text() == keys.base_yaml()
    assert load.load(base) == schema.Config()


def test_event_names(golden):
    lines = [f"{name}: {', '.join(fields)}" for name, fields in events.NAMES.items()]
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
