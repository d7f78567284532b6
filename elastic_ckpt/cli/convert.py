"""`elastic-ckpt convert SRC DST --rules R`: writes a checkpoint in a different layout.

SRC can have any format that can be read. DST is a step directory for Orbax, or a model
directory for safetensors and Hugging Face. Without rules, tensors keep their names.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import time
from typing import Any

from elastic_ckpt.cli import option_numbers, progress_line
from elastic_ckpt.core import boxes, errors
from elastic_ckpt.universal import listing, opening
from elastic_ckpt.universal.moves import Matched, Move
from elastic_ckpt.universal.reading import arithmetic
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.writing import convert


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleUse:
    """The tensors that a rule copies.

    Attributes:
      rule: the rule's location in the layout.
      sources: the number of stored tensors that the rule reads.
      targets: the number of tensors that the rule creates, in whole or in part.
      num_bytes: the size of the copied elements in the target dtypes.
    """

    rule: str
    sources: int
    targets: int
    num_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "source", metavar="SRC", help="a checkpoint in any format that can be read"
    )
    parser.add_argument(
        "target",
        metavar="DST",
        nargs="?",
        help="the checkpoint to write: DIRECTORY/<step> for Orbax, or the directory of"
        " safetensors files",
    )
    looks = parser.add_mutually_exclusive_group()
    looks.add_argument(
        "--list",
        action="store_true",
        help="list the tensors of SRC by name pattern without writing anything",
    )
    looks.add_argument(
        "--check",
        metavar="TREE",
        nargs="?",
        const="",
        help="show the tensors that each rule of --rules copies from SRC, or the"
        " missing tensors and the nearest rule. TREE, the tensors to create, is a"
        " checkpoint or a JSON file that maps names to shapes; by default, all tensors"
        " that the rules create",
    )
    parser.add_argument(
        "--rules",
        metavar="LAYOUT",
        help="the layout: a YAML file, or the name of a layout in the package. By"
        " default, the layout that DeepSpeed wrote into SRC; without one, tensors keep"
        " their names, and an adapter is merged",
    )
    parser.add_argument(
        "--size",
        action="append",
        type=option_numbers.named_positive_count,
        default=[],
        metavar="NAME=NUMBER",
        help="the size of a dimension of the layout; may be repeated",
    )
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="apply the layout in reverse, because it describes DST to SRC",
    )
    parser.add_argument(
        "--to",
        choices=("orbax", "safetensors", "hf"),
        default="orbax",
        help="the format to write; by default orbax. hf writes safetensors and"
        " everything else that Hugging Face's from_pretrained needs",
    )
    parser.add_argument(
        "--config",
        metavar="MODEL",
        help="a Hugging Face model directory, or hf://org/name in the local cache; its"
        " config.json sets sizes of the layout. --to hf copies config.json and the"
        " tokenizer files",
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="cast all floating-point tensors, for example to bfloat16",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="convert only the weights, without the optimizer and the step",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the plan without writing anything"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Converts or shows the plan."""
    job = convert.Job(
        source=arguments.source,
        target=arguments.target or "",
        rules=arguments.rules,
        sizes=dict(arguments.size),
        is_reversed=arguments.reverse,
        to=arguments.to,
        config=arguments.config,
        dtype=arguments.dtype,
        only_weights=arguments.weights,
    )
    if arguments.list:
        rows, lines = _listed(arguments.source)
    elif arguments.check is not None:
        rows, lines = _checked(job, arguments.check)
    elif arguments.target is None:
        raise errors.ConfigError(
            "DST, the checkpoint to write, is missing; specify it after SRC, or use"
            " --list or --check to inspect SRC"
        )
    elif arguments.dry_run:
        rows, lines = _planned(job)
    else:
        rows, lines = _converted(job)
    print(json.dumps(rows, indent=2) if arguments.json else "\n".join(lines))
    return 0


# The output as JSON and as text.
_Shown = tuple[dict[str, Any] | list[dict[str, Any]], list[str]]


def _converted(job: convert.Job) -> _Shown:
    began_secs = time.monotonic()
    progress = progress_line.ProgressLine("wrote")
    done = convert.convert(job, progress=progress)
    progress.end()
    result = {
        "path": job.target,
        "format": job.to,
        "tensors": len(done.targets),
        "num_bytes": done.num_bytes,
        "secs": round(time.monotonic() - began_secs, 3),
    }
    return result, [
        f"{job.target}: {len(done.targets):,} tensors, {done.num_bytes:,} bytes,"
        f" in {result['secs']:.1f} s"
    ]


def _listed(source: str) -> _Shown:
    families = listing.families(opening.open_checkpoint(source).tensors)
    rows = [
        {**each._asdict(), "shape": list(each.shape), "dtype": each.dtype.name}
        for each in families
    ]
    return rows, [
        f"{each.names}  {list(each.shape)} {each.dtype.name}"
        + f" ({each.kind})" * (each.kind != "parameter")
        + f"  {each.tensors:,} tensors, {each.num_bytes:,} bytes"
        for each in families
    ]


def _checked(job: convert.Job, given: str) -> _Shown:
    if job.rules is None:
        raise errors.ConfigError("--check needs a layout; specify one with --rules")
    checkpoint = opening.open_checkpoint(job.source)
    layout = convert.given_layout(job, checkpoint)
    tree = listing.tree(given) if given else None
    matched = matching.moves(layout, checkpoint.tensors, checkpoint.axes, tree)
    uses = _rule_uses(matched, len(checkpoint.tensors))
    rows = [dataclasses.asdict(each) for each in uses]
    return rows, [f"{layout.place} matches:", *map(_described, uses)]


def _planned(job: convert.Job) -> _Shown:
    planned = convert.Conversion(job)
    # Raises an error if the format or the path does not allow the conversion.
    convert.destination_of(planned)
    checkpoint, matched = planned.checkpoint, planned.matched
    uses = _rule_uses(matched, len(checkpoint.tensors))
    filled = [
        boxes.Box(start=each.start, stop=each.stop).volume
        * matched.targets[each.target].dtype.itemsize
        for each in matched.fills
    ]
    planned.reader.checks.finish()
    unverified = [each for each in planned.files if not checkpoint.checksums(each)]
    result = {
        "format": checkpoint.format,
        "sources": len(checkpoint.tensors),
        "targets": len(planned.targets),
        "num_bytes": planned.num_bytes,
        "rules": [dataclasses.asdict(each) for each in uses],
        "fills": len(filled),
        "filled_bytes": sum(filled),
        "unverified": unverified,
    }
    lines = [
        f"{checkpoint.format}: {len(checkpoint.tensors):,} tensors",
        f"to write: {len(planned.targets):,} tensors, {planned.num_bytes:,} bytes",
        *map(_described, uses),
    ]
    if filled:
        lines.append(f"  padding: {len(filled):,} boxes, {sum(filled):,} bytes")
    if unverified:
        named = errors.first_of(unverified)
        lines.append(f"{len(unverified):,} files without a checksum: {named}")
    return result, [*lines, "nothing was written"]


def _described(use: RuleUse) -> str:
    return (
        f"  {use.rule}: {use.sources:,} tensors to {use.targets:,},"
        f" {use.num_bytes:,} bytes"
    )


def _rule_uses(matched: Matched, num_stored: int) -> list[RuleUse]:
    # In the order of the layout.
    uses: dict[str, list[Move]] = collections.defaultdict(list)
    begin = 0
    for rule, stop in matched.rules:
        uses[rule] += matched.moves[begin:stop]
        begin = stop
    return [
        RuleUse(
            rule=rule,
            sources=len(
                {
                    number
                    for move in moves
                    for number in arithmetic.stored_of(matched, move.source, num_stored)
                }
            ),
            targets=len({move.target for move in moves}),
            num_bytes=sum(
                math.prod(move.sizes) * matched.targets[move.target].dtype.itemsize
                for move in moves
            ),
        )
        for rule, moves in uses.items()
    ]
