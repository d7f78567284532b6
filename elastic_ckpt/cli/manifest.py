"""`elastic-ckpt manifest CONFIG key=value...`: the JobSet or script that runs it."""

from __future__ import annotations

import argparse
import sys

from etils import epy

from elastic_ckpt.cli import overrides
from elastic_ckpt.core import errors, storage
from elastic_ckpt.training import load, schema

with epy.lazy_imports():
    from elastic_ckpt.deploy import manifest, nodes, program, settings, slurm
    from elastic_ckpt.training import configured


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
    config = load.load(arguments.config, arguments.overrides)
    configured.check_keys(config)
    if arguments.slurm:
        text = slurm.script(config)
    elif arguments.nodes:
        text = manifest.to_yaml(nodes.documents(config))
    else:
        text = manifest.to_yaml(manifest.documents(config))
    if program.is_train(config) and not arguments.nodes:
        _check_train(config, is_slurm=arguments.slurm)
    if arguments.output:
        storage.write_atomic(arguments.output, text.encode())
    else:
        print(text, end="")
    return 0


def _check_train(config: schema.Config, *, is_slurm: bool) -> None:
    data = config.data
    if not data.grain_train_files and not data.grain_train_mixture_config_path:
        raise errors.ConfigError(
            "grain_train_files is empty; set it to the training data, in a bucket or on"
            " a volume that all hosts mount"
        )
    if is_slurm:
        configured.check_world(config)
        return
    files = data.grain_train_mixture_config_path or data.grain_train_files
    mounted = settings.mapping("pod_volumes", config.pods.pod_volumes)
    if files.startswith("/") and not any(map(files.startswith, mounted)):
        print(
            f"elastic-ckpt manifest: pod_volumes mounts no volume for {files}, so the"
            " image has to contain it",
            file=sys.stderr,
        )
