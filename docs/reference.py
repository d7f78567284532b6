"""Pages of the site that are written from the code, each time that it is built."""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import math
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

import json_fields
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import elastic_ckpt as ec
from elastic_ckpt.cli import main as cli
from elastic_ckpt.elastic import failures

ROOT = pathlib.Path(__file__).parent.parent
# The directory of the pages that are not written here.
PAGES = "docs/pages/"

API = {
    "elastic_ckpt": "Checkpoints, batches and the run",
    "elastic_ckpt.data": "Data",
    "elastic_ckpt.data.lm": "Data for language models",
    "elastic_ckpt.components": "Components",
    "elastic_ckpt.elastic": "Elastic runs",
    "elastic_ckpt.universal": "Layouts of other programs",
    "elastic_ckpt.orbax_v0": "Orbax's older API",
}

# What exported functions return, if it is not exported, for its methods.
RETURNED = {
    "elastic_ckpt.universal.open_checkpoint": (
        "elastic_ckpt.universal.formats.checkpoint.Checkpoint"
    ),
}

# Pages beside the code, and where the site has them.
INCLUDED = {
    "elastic_ckpt/steps/FORMAT.md": "reference/formats/steps.md",
    "elastic_ckpt/data/FORMAT.md": "reference/formats/data-state.md",
    "elastic_ckpt/checkpoint/components/FORMAT.md": "reference/formats/components.md",
    "elastic_ckpt/training/STEP_LOG.md": "reference/formats/step-log.md",
    "elastic_ckpt/universal/formats/FORMATS.md": "reference/formats/other-programs.md",
    "elastic_ckpt/universal/rules/GRAMMAR.md": "reference/layout-rules.md",
    "configs/layouts/README.md": "reference/shipped-layouts.md",
    "elastic_ckpt/monitoring/METRICS.md": "reference/metrics.md",
    "CHANGELOG.md": "about/changelog.md",
    "docs/upstream/README.md": "about/upstream.md",
}
# Links of those pages lead to the site where it has the page, and else to the code.
ON_SITE = INCLUDED | {
    "README.md": "index.md",
    "configs/base.yml": "reference/keys.md",
    "SECURITY.md": "about/security.md",
}

_KEYS = """\
# Configuration keys

A configuration file sets keys, and `key=value` arguments override it. A key that
MaxText has too carries MaxText's name. `elastic-ckpt config FILE` prints what would
run, and where each key is set.
"""

_RETURNED = """\
::: {path}
    options: {{heading: "{heading}", heading_level: 3, show_signature: false,
      merge_init_into_class: false, filters: ["!^_"]}}
"""

_ERRORS = """\
# Errors

Every error of the library says what is missing or wrong, where, and what to do. Search
this page for words of your error; `…` stands for what differs.

::: elastic_ckpt.core.errors
    options: {show_root_heading: false, filters: ["!^first_of"]}
"""

_JSON = """\
# JSON of the command line

With `--json`, a verb prints one JSON value with the fields below, so that programs need
not read the text that it prints for people. `[]` stands for each item of a list, `*`
for any name, and `null` for what is not known or not there, as the meaning says.

These fields are frozen: a change to one is in the [changelog](../about/changelog.md).
New fields may be added, so ignore those that your program does not know.
"""

_VERDICTS = """\
# Verdicts

When a world of a run is lost, or the run ends with an error, the run names what failed
in one line (`verdict: host 1 was killed from outside ...: restart`), in the event
`verdict`, and in its [report](../guides/watch-and-repair.md).

The verdict is the first row below that fits what the hosts recorded. *Restart* starts
another world, *leave out* starts one without the slice until it rejoins, and *stop*
ends the run.

| Kind | What failed | It | Action | What helps |
|---|---|---|---|---|
"""

_RUNBOOK = """\
# Runbook

What each of the [shipped alerts](../guides/watch-and-repair.md) means, and what to do
first. `RUN` stands for the directory of the run.
"""

_BENCHMARKS = """\
# Benchmarks

`python -m benchmarks SUITE` measures a suite, with all peers in the same run, and
`--json FILE` keeps all samples. These are the medians of the newest recorded run of
each suite. The machines are small, shared and noisy, so ratios say more than times.

## Behind

These figures miss their goal, or are behind another program in the same run.
"""
_FIGURES = (
    "| Figure | Median | Unit | Goal, and what it is compared with |",
    "|---|---|---|---|",
)
# The goal at the beginning of what a figure is compared with.
_GOAL = re.compile(r"(at least|at most|below|ahead)\s?([\d,]*\.?\d*)")
_PROGRAMS = re.compile(r"Orbax|Grain|MaxText|device_put")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the written pages to those of the directory (a hook of MkDocs)."""
    pages = {
        "reference/keys.md": keys(),
        "reference/command-line.md": command_line(),
        "reference/json.md": json_of_verbs(),
        "reference/errors.md": errors(),
        "reference/verdicts.md": verdicts(),
        "reference/runbook.md": runbook(),
        "about/benchmarks.md": benchmarks(),
    }
    pages |= {f"reference/api/{_page(name)}.md": api(name) for name in API}
    for source, target in INCLUDED.items():
        pages[target] = included(source, target)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def api(name: str) -> str:
    """The exported names of a module, each with its docstring."""
    module: Any = ec
    for part in name.split(".")[1:]:
        module = getattr(module, part)
    modules = {other.rpartition(".")[2] for other in API}
    exported = [n for n in module.__all__ if n not in modules | {"__version__"}]
    lines = [f"# {API[name]}", ""]
    lines += [f"`{name}`: {(module.__doc__ or '').strip()}", ""]
    for exported_name in exported:
        path = f"{name}.{exported_name}"
        lines.append(f"::: {path}\n")
        if path in RETURNED:
            heading = f"What {exported_name} returns"
            lines.append(_RETURNED.format(path=RETURNED[path], heading=heading))
    return "\n".join(lines)


def _page(module: str) -> str:
    return module.removeprefix("elastic_ckpt.").replace(".", "-")


def keys() -> str:
    """Every configuration key, as configs/base.yml explains it."""
    lines = [_KEYS]
    comment: list[str] = []
    for line in (ROOT / "configs/base.yml").read_text().splitlines():
        if line.startswith("########"):
            lines += [f"## {line.strip('# ').rstrip('.')}", ""]
        elif line.startswith("# "):
            comment.append(line[2:])
        elif match := re.match(r"(\w+): (.*)", line):
            key, default = match.groups()
            lines += [f"### `{key}`", "", _text(" ".join(comment)), ""]
            lines += [f"Default: `{default}`", ""]
        if not line.startswith("# "):
            comment = []
    return "\n".join(lines)


def command_line() -> str:
    """Every verb, with its arguments."""
    lines = ["# Command line", ""]
    parser = cli.build_parser()
    for verb, verb_parser, purpose in _verbs(parser):
        lines += [f"## `elastic-ckpt {verb}`", "", _text(purpose), ""]
        usage = " ".join(verb_parser.format_usage().split()).removeprefix("usage: ")
        lines += ["```text", usage, "```", "", "| Argument | Meaning |", "|---|---|"]
        for action in verb_parser._actions:
            names = ", ".join(action.option_strings) or action.metavar or action.dest
            meaning = (action.help or "").replace("%(default)s", str(action.default))
            lines.append(f"| `{names}` | {_text(meaning.replace('%%', '%'))} |")
        lines.append("")
    return "\n".join(lines)


def json_of_verbs() -> str:
    """The fields that each verb prints with --json."""
    lines = [_JSON]
    for call in json_fields.OUTPUTS:
        verb, _, options = call.partition(" ")
        shown = " ".join(["elastic-ckpt", verb, "--json", options]).strip()
        lines += [f"## `{shown}`", "", "| Field | Type | Meaning |", "|---|---|---|"]
        for each in json_fields.fields(call):
            meaning = re.sub(r"\bNone\b", "`null`", _text(each.meaning))
            lines.append(f"| `{each.path}` | `{each.type}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _verbs(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            purposes = {c.dest: c.help or "" for c in action._choices_actions}
            for verb, verb_parser in action.choices.items():
                yield verb, verb_parser, purposes.get(verb, "")


def errors() -> str:
    """The text of every error, found in the code that raises it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "elastic_ckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (text := _message(node)):
                module = str(path.relative_to(ROOT).parent).replace("/", ".")
                found.setdefault(module, []).append(text)
    lines = [_ERRORS]
    for module, texts in sorted(found.items()):
        lines += [f"## Raised in `{module}`", ""]
        lines += [f"* {_text(text)}" for text in sorted(set(texts))]
        lines.append("")
    return "\n".join(lines)


def _message(call: ast.Call) -> str:
    # The first argument of a call such as errors.DataError(f"...").
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    is_ours = name.endswith("Error") and not hasattr(builtins, name)
    if not (is_ours and call.args):
        return ""
    text = _literal(call.args[0])
    return f"{name}: {text}" if len(text.replace("…", "").split()) > 2 else ""


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_literal, node.values))
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return "…"


def verdicts() -> str:
    """Every kind of failure, and what a run does about it."""
    rows = [
        (f"`{kind.name}`", kind.what, kind.meaning, kind.action, kind.advice)
        for kind in failures.KINDS
    ]
    return _VERDICTS + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def runbook() -> str:
    """Every alert, as configs/monitoring/alerts.yaml explains it."""
    lines = [_RUNBOOK]
    shipped = (ROOT / "configs/monitoring/alerts.yaml").read_text()
    for group in yaml.safe_load(shipped)["groups"]:
        for rule in group["rules"]:
            means = rule["annotations"]
            lines += [f"## {rule['alert']}", "", f"{_readable(means['summary'])}.", ""]
            lines += [_readable(means["description"]), ""]
    return "\n".join(lines)


def _readable(template: str) -> str:
    # `{{ $value | humanizeDuration }}` stands for a value that an alert fills in.
    return _text(re.sub(r"\{\{.*?\}\}", "…", template))


def benchmarks() -> str:
    """The newest recorded figures of every suite, each with its machine and date."""
    lines, behind = [], []
    for suite, path in sorted(_newest_results().items()):
        recorded = json.loads(path.read_text())
        machine = recorded["machine"]
        accelerators = (
            f", {machine['accelerators']}" if "accelerators" in machine else ""
        )
        lines += [
            f"## {suite}",
            "",
            f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores,"
            f" {machine['memory']}{accelerators}.",
            "",
            *_FIGURES,
        ]
        for name, figure in recorded["figures"].items():
            against = _text(figure.get("against") or "")
            value = f"{figure['value']:.3g}"
            lines.append(f"| `{name}` | {value} | {figure['unit']} | {against} |")
            if _is_behind(figure):
                behind.append(f"| {suite} {lines[-1]}")
        lines.append("")
    head = [f"| Suite {_FIGURES[0]}", f"|---{_FIGURES[1]}"]
    return "\n".join([_BENCHMARKS, *head, *behind, "", *lines])


def _is_behind(figure: dict[str, Any]) -> bool:
    # Whether a figure misses its goal, or is a ratio to another program on the wrong
    # side of 1.
    against = figure.get("against") or ""
    goal = _GOAL.match(against)
    if goal is None:
        return False
    limits = [float(goal[2].replace(",", ""))] if goal[2] else []
    is_lower = goal[1] in ("at most", "below")
    if figure["unit"] == "ratio" and (not is_lower or _PROGRAMS.search(against)):
        limits.append(1.0)
    if is_lower:
        return figure["value"] > min(limits, default=math.inf)
    return figure["value"] < max(limits, default=-math.inf)


def _newest_results() -> dict[str, pathlib.Path]:
    newest = {}
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        newest[path.stem[: -len("-2026-01-01")]] = path
    return newest


def included(source: str, target: str) -> str:
    """A page beside the code, with its links leading where the site has them."""

    def link(match: re.Match[str]) -> str:
        text, path = match.groups()
        if path.startswith(("http", "#", "mailto:")) or not path:
            return match.group()
        at = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = ON_SITE.get(at)
        if at.startswith(PAGES):
            page = at.removeprefix(PAGES)
        if page:
            to = posixpath.relpath(page, posixpath.dirname(target))
            return f"[{text}]({to})"
        # The site has no address of the code; the path says where it is.
        return f"{text} (`{at}`)"

    page = (ROOT / source).read_text()
    return re.sub(r"\[([^\]]+)\]\(([^)#]*)(?:#[^)]*)?\)", link, page)


def _text(text: str) -> str:
    # What Markdown and tables would take as signs is meant as it stands, but for code.
    parts = text.replace("\n", " ").split("`")
    parts[::2] = [re.sub(r"([<>*_\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|") if len(parts) > 1 else parts[0]
