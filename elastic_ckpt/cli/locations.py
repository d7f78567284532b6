"""Arguments that name checkpoints, by path or peer; the same for every verb."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from etils import epath

from elastic_ckpt.application import run_directory
from elastic_ckpt.core import bucket_clients, errors, storage

if TYPE_CHECKING:
    from elastic_ckpt.inspect import tier_locations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name paths and peers."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="the directory of a run (with its steps in the RAM of this machine), a RAM"
        " disk, a directory of steps, or one step; several are searched together",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="the URL of another machine's agent; may be repeated",
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the secret of the run; by default that of the RAM disk at"
        " PATH",
    )
    parser.add_argument(
        "--tls-authority",
        help="a PEM file with the authority that signs the agents' certificates",
    )
    parser.add_argument(
        "--run",
        help="the identity of the run, if PATH has steps of several; by default the"
        " first",
    )


def is_run(path: str) -> bool:
    """Whether `path` is the directory of a run.

    Raises:
      RunError: if it cannot be read.
    """
    directory = storage.absolute(path)
    try:
        return any(
            (directory / name).exists()
            for name in (run_directory.CONFIG, run_directory.LOOP)
        )
    except bucket_clients.failures() as error:
        raise errors.RunError(
            f"{directory} cannot be read ({error}); check the path, the network and who"
            " may read there"
        ) from error


def ram_disks(path: str) -> list[epath.Path]:
    """The RAM disks of this machine that have steps of the run at `path`.

    Raises:
      ConfigError: if the run's configuration cannot be read.
    """
    from elastic_ckpt.application import configured
    from elastic_ckpt.inspect import tier_locations

    own = run_directory.read_loop(path)
    if own is not None:
        named = [own.local] if own.local else []
    else:
        config = run_directory.read_config(path)
        if not config.tiers.enable_multi_tier_checkpointing:
            return []
        named = configured.ram_directories(config)
    directories = map(storage.absolute, named)
    return list(filter(tier_locations.is_ram_disk, directories))


@contextlib.contextmanager
def opened(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, tier_locations.Locations]]:
    """The run and the places that `arguments` name, open while the block runs.

    Raises:
      ConfigError: if no path or peer is named, or a peer without its run or secret.
      CheckpointError: if a path does not exist.
    """
    from elastic_ckpt.inspect import tier_locations

    paths = arguments.paths
    if not (paths or arguments.peer):
        raise errors.ConfigError("give a PATH, or a peer with --peer URL")
    for url in arguments.peer:
        from elastic_ckpt.tiers.peers import agent_url

        agent_url.check(url, what="--peer", needs_tls=bool(arguments.tls_authority))
    of_runs = {
        path: run_directory.saved_steps_of(path) for path in paths if is_run(path)
    }
    # A run's steps in the RAM of this machine are shown with its directory.
    in_ram = [disk for path in of_runs for disk in ram_disks(path)]
    in_tiers = [of_runs.get(path, path) for path in paths]
    in_tiers += [path for path in in_ram if path not in map(storage.absolute, paths)]
    run = arguments.run
    if run is None:
        run = next(filter(None, map(tier_locations.find_run, in_tiers)), None)
    if run is None and arguments.peer:
        raise errors.ConfigError(
            "no manifest in PATH names the run to request from the peers; add --run"
        )
    # Without a manifest there are only steps of plain Orbax.
    run = run or ""
    locations: list[tier_locations.Location] = [
        # A run may have saved nothing yet.
        tier_locations.at_steps(path, run=run)
        if path in of_runs.values()
        else tier_locations.at_path(path, run=run)
        for path in in_tiers
    ]
    with contextlib.ExitStack() as closing:
        if arguments.peer:
            from elastic_ckpt.tiers.peers import peer, peer_client, secret

            client = peer_client.PeerClient(
                secret.read(_secret_file(arguments, in_tiers)),
                tls_ca=arguments.tls_authority,
            )
            closing.callback(client.close)
            locations += [peer.Peer(url, client, run) for url in arguments.peer]
        yield run, tier_locations.Locations(locations)


def _secret_file(arguments: argparse.Namespace, paths: Sequence[epath.PathLike]) -> str:
    from elastic_ckpt.tiers.peers import secret

    candidates = [arguments.secret_file] if arguments.secret_file else []
    candidates += [path for path in map(secret.path, paths) if os.path.exists(path)]
    if not candidates:
        raise errors.ConfigError(
            "--peer needs the run's secret: add --secret-file FILE (RAM_DISK/secret on"
            " any machine of the run)"
        )
    return candidates[0]
