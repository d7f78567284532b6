"""`elastic-ckpt plan`: which host would read which shards, per hosts and batch size."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.cli import option_numbers
from elastic_ckpt.data import cursors, rows
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.training import load

_SHOWN_RANGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """The shards that hosts would read, for a number of hosts and a batch size.

    Attributes:
      num_hosts: the number of hosts.
      global_batch_size: the number of rows in a batch.
      host_shards: the shards that each host reads.
      shard_reads: the mean number of hosts that read a shard.
    """

    num_hosts: int
    global_batch_size: int
    host_shards: tuple[tuple[int, ...], ...]
    shard_reads: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument(
        "config",
        nargs="?",
        help="a YAML file with the data and the number of shards",
    )
    parser.add_argument(
        "--hosts",
        type=option_numbers.positive_counts,
        required=True,
        help="host counts, separated by commas",
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
        help="number of logical shards; by default the smallest number for which each"
        " shard is read only once",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the outlook for every combination."""
    hosts, batches = arguments.hosts, arguments.batches
    num_shards = arguments.shards
    if arguments.config:
        keys = load.load(arguments.config).data
        num_shards = num_shards or keys.num_logical_shards
        if not arguments.json:
            print(pipeline.describe(keys))
    num_shards = num_shards or rows.suggest_num_shards(hosts, batches)
    outlooks = [outlook(num_shards, h, size) for h in hosts for size in batches]
    content = [dataclasses.asdict(each) for each in outlooks]
    print(
        json.dumps({"num_shards": num_shards, "outlooks": content}, indent=2)
        if arguments.json
        else describe(num_shards, outlooks)
    )
    return 0


def outlook(num_shards: int, num_hosts: int, global_batch_size: int) -> Outlook:
    """The outlook if hosts load equal, consecutive parts of every batch."""
    row_hosts = np.arange(global_batch_size) * num_hosts // global_batch_size
    runs = [
        rows.host_shards(
            num_shards, global_batch_size, np.flatnonzero(row_hosts == host)
        ).tolist()
        for host in range(num_hosts)
    ]
    return Outlook(
        num_hosts=num_hosts,
        global_batch_size=global_batch_size,
        host_shards=tuple(map(tuple, runs)),
        shard_reads=sum(map(len, runs)) / num_shards,
    )


def describe(num_shards: int, outlooks: Sequence[Outlook]) -> str:
    """The outlooks as text."""
    lines = [f"{num_shards} logical shards"]
    for each in outlooks:
        line = (
            f"{each.num_hosts} hosts, batches of {each.global_batch_size}:"
            f" shards are read {each.shard_reads:.3g} times"
        )
        if each.global_batch_size % each.num_hosts:
            line += (
                f"; JAX needs a mesh that shards rows over fewer than {each.num_hosts}"
                " hosts"
            )
        lines.append(line)
        for host in sorted({0, each.num_hosts - 1}):
            lines.append(
                f"  host {host} reads shards {_ranges(each.host_shards[host])}"
            )
    return "\n".join(lines)


def _ranges(shards: Sequence[int]) -> str:
    ranges = [(run[0], run[-1]) for run in cursors.runs(shards)]
    shown = [f"{a}-{b}" if a < b else f"{a}" for a, b in ranges[:_SHOWN_RANGES]]
    more = [f"... {len(shards)} in all"] if len(ranges) > _SHOWN_RANGES else []
    return ", ".join(shown + more)
