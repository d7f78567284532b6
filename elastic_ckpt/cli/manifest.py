"""`elastic-ckpt manifest CONFIG key=value...`: the JobSet or script that runs it."""

from __future__ import annotations

import argparse

from elastic_ckpt.cli import overrides
from elastic_ckpt.config import load
from elastic_ckpt.core import storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    overrides.add_arguments(parser, example="configs/deploy/pathways_v6e.yml")
    parser.add_argument(
        "--slurm", action="store_true", help="write a batch script for Slurm"
    )
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="write the DaemonSet with which RAM disks outlive pods, once for a"
        " cluster",
    )
    parser.add_argument("--output", help="the file to write; by default it is printed")


def run(arguments: argparse.Namespace) -> int:
    """Prints or writes the manifest."""
    from elastic_ckpt.application import elastic_run
    from elastic_ckpt.deploy import manifest, nodes, slurm

    config = load.load(arguments.config, arguments.overrides)
    elastic_run.check_checkpoints(config)
    elastic_run.check_tiers(config)
    if arguments.slurm:
        text = slurm.script(config)
    elif arguments.nodes:
        text = manifest.to_yaml(nodes.documents(config))
    else:
        text = manifest.to_yaml(manifest.documents(config))
    if arguments.output:
        storage.write_atomic(arguments.output, text.encode())
    else:
        print(text, end="")
    return 0
