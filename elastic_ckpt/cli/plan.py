"""`elastic-ckpt plan`: which host would read which shards, by hosts and batch size."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from etils import epy

from elastic_ckpt.core import option_numbers
from elastic_ckpt.training import load

with epy.lazy_imports():
    from elastic_ckpt.data import (
        cursors,
        elastic_data,
        local_batches,
        plan,
        rows,
        stages,
    )
    from elastic_ckpt.data.lm import pipeline

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
    data = load.load(arguments.config).data if arguments.config else None
    num_shards = (
        arguments.shards
        or (0 if data is None else data.num_logical_shards)
        or rows.suggest_num_shards(hosts, batches)
    )
    if data is None:
        outlooks = plan.outlooks(num_shards, hosts, batches)
    else:
        made = pipeline.from_config(data)
        if not arguments.json:
            print(pipeline.describe(data))
        outlooks = _outlooks_of(made, num_shards, hosts, batches)
    content = [dataclasses.asdict(outlook) for outlook in outlooks]
    print(
        json.dumps({"num_shards": num_shards, "outlooks": content}, indent=2)
        if arguments.json
        else describe(num_shards, outlooks)
    )
    return 0


def _outlooks_of(
    data: elastic_data.ElasticData,
    num_shards: int,
    hosts: Sequence[int],
    batches: Sequence[int],
) -> list[plan.Outlook]:
    def row_bytes(data: elastic_data.ElasticData) -> int:
        first = next(local_batches.LocalBatches(data, global_batch_size=1))
        return sum(feature.nbytes for feature in first.values())

    staged = stages.of(data)
    if staged is None:
        return plan.outlooks(num_shards, hosts, batches, row_bytes=row_bytes(data))
    all_bytes = {each.begin: row_bytes(each.data) for each in staged.stages}
    found = []
    for num_hosts in hosts:
        for size in batches:
            begins = [s.begin for s in staged.stages if s.global_batch_size == size]
            # A size that no stage has could be that of any.
            begins = begins or list(all_bytes)
            for num_bytes in dict.fromkeys(all_bytes[begin] for begin in begins):
                alike = tuple(
                    begin for begin in begins if all_bytes[begin] == num_bytes
                )
                outlook = plan.outlook(num_shards, num_hosts, size, row_bytes=num_bytes)
                if len(alike) < len(all_bytes):
                    outlook = dataclasses.replace(outlook, begin_steps=alike)
                found.append(outlook)
    return found


def describe(num_shards: int, outlooks: Sequence[plan.Outlook]) -> str:
    """The outlooks as text."""
    lines = [f"{num_shards} logical shards"]
    for outlook in outlooks:
        lines.append(
            f"{outlook.num_hosts} hosts, batches of {outlook.global_batch_size}"
            f"{_stages(outlook.begin_steps)}: {_verdict(outlook)}"
        )
        for host in sorted({0, outlook.loading_hosts - 1} - {-1}):
            shards = _ranges(outlook.host_shards[host])
            lines.append(f"  host {host} reads shards {shards}")
    return "\n".join(lines)


def _stages(begin_steps: Sequence[int]) -> str:
    if not begin_steps:
        return ""
    steps = ", ".join(f"{step:,}" for step in begin_steps)
    return f", stage{'s' * (len(begin_steps) > 1)} from step {steps}"


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
