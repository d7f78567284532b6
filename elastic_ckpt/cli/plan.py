"""`elastic-ckpt plan`: which host would read which shards, by hosts and batch size."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from elastic_ckpt.core import option_numbers
from elastic_ckpt.data import (
    cursors,
    elastic_data,
    local_batches,
    plan,
    rows,
    stages,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.training import load

_SHOWN_RANGES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "config",
        nargs="?",
        help="a YAML file, for its data and its number of shards",
    )
    parser.add_argument(
        "--hosts",
        type=option_numbers.positive_counts,
        required=True,
        help="numbers of hosts, separated by commas",
    )
    parser.add_argument(
        "--batches",
        type=option_numbers.positive_counts,
        required=True,
        help="global batch sizes, separated by commas",
    )
    parser.add_argument(
        "--shards",
        type=option_numbers.count,
        default=0,
        help="number of logical shards; by default the smallest that fits",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the outlook of every combination."""
    hosts, batches = arguments.hosts, arguments.batches
    num_shards, row_bytes = arguments.shards, None
    if arguments.config:
        keys = load.load(arguments.config).data
        num_shards = num_shards or keys.num_logical_shards
        row_bytes = _row_bytes(pipeline.from_config(keys))
        if not arguments.json:
            print(pipeline.describe(keys))
    num_shards = num_shards or rows.suggest_num_shards(hosts, batches)
    outlooks = plan.outlooks(num_shards, hosts, batches, row_bytes=row_bytes)
    content = [dataclasses.asdict(outlook) for outlook in outlooks]
    print(
        json.dumps({"num_shards": num_shards, "outlooks": content}, indent=2)
        if arguments.json
        else describe(num_shards, outlooks)
    )
    return 0


def _row_bytes(data: elastic_data.ElasticData) -> int:
    # Of the longest rows, if stages of the data have some of several lengths.
    staged = stages.of(data)
    of_stages = [data] if staged is None else [each.data for each in staged.stages]
    firsts = [local_batches.LocalBatches(of, global_batch_size=1) for of in of_stages]
    return max(sum(each.nbytes for each in next(first).values()) for first in firsts)


def describe(num_shards: int, outlooks: Sequence[plan.Outlook]) -> str:
    """The outlooks as text."""
    lines = [f"{num_shards} logical shards"]
    for outlook in outlooks:
        lines.append(
            f"{outlook.num_hosts} hosts, batches of {outlook.global_batch_size}:"
            f" {_verdict(outlook)}"
        )
        for host in sorted({0, outlook.loading_hosts - 1} - {-1}):
            shards = _ranges(outlook.host_shards[host])
            lines.append(f"  host {host} reads shards {shards}")
    return "\n".join(lines)


def _verdict(outlook: plan.Outlook) -> str:
    size, num_hosts = outlook.global_batch_size, outlook.num_hosts
    parts = [f"{outlook.arrangement}, rows identical to those of one host"]
    if size % num_hosts:
        parts.append(f"JAX needs a mesh that shards rows over fewer than {num_hosts}")
    if outlook.loading_hosts < num_hosts:
        parts.append(
            f"{outlook.loading_hosts} of the hosts load, {outlook.host_rows} rows each"
        )
    if outlook.moved_rows:
        known = outlook.moved_bytes
        of_bytes = "" if known is None else f" ({known:,} bytes)"
        parts.append(
            f"{outlook.moved_rows} of {size} rows{of_bytes} move between hosts' devices"
        )
    return "; ".join(parts)


def _ranges(shards: Sequence[int]) -> str:
    ranges = [(run[0], run[-1]) for run in cursors.runs(shards)]
    shown = [f"{a}-{b}" if a < b else f"{a}" for a, b in ranges[:_SHOWN_RANGES]]
    more = [f"... {len(shards)} in all"] if len(ranges) > _SHOWN_RANGES else []
    return ", ".join(shown + more)
