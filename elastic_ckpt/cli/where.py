"""The places that a person names: paths and peers, the same for every verb."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elastic_ckpt.cli import run_directory
from elastic_ckpt.core import errors, storage

if TYPE_CHECKING:
    from elastic_ckpt.tiers import places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names places."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a run, a RAM disk, persistent steps or one of them; several count as one",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="the agent of another machine; may be given several times",
    )
    parser.add_argument(
        "--secret-file",
        help="a file with the run's secret; without it, that of the RAM disk at PATH",
    )
    parser.add_argument(
        "--tls-authority", help="a PEM file: who signs the certificates of agents"
    )
    parser.add_argument(
        "--run", help="the identity of the run; without it, as the first manifest says"
    )


def is_run(path: str) -> bool:
    """Whether `path` is the directory of a run of `elastic-ckpt train`."""
    return (storage.absolute(path) / run_directory.CONFIG).exists()


@contextlib.contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[tuple[str, places.Places]]:
    """The run, and the places, as long as the block runs.

    Raises:
      ConfigError: if nothing is named, or what goes with it is not.
      CheckpointError: if there is nothing at a path.
    """
    from elastic_ckpt.checkpoint import checkpointer
    from elastic_ckpt.tiers import places

    paths = arguments.paths
    if not (paths or arguments.peer):
        raise errors.ConfigError("name a PATH, or a peer with --peer URL")
    for url in arguments.peer:
        from elastic_ckpt.tiers.peers import agent_url

        agent_url.check(url, what="--peer", needs_tls=bool(arguments.tls_authority))
    of_runs = [os.path.join(path, checkpointer.DIRECTORY) for path in paths]
    in_tiers = [
        steps if is_run(path) else path
        for path, steps in zip(paths, of_runs, strict=True)
    ]
    run = arguments.run
    if run is None:
        run = next(filter(None, map(places.find_run, in_tiers)), None)
    if run is None and arguments.peer:
        raise errors.ConfigError(
            "no manifest at a PATH tells which run the peers are asked for; add --run"
        )
    # Without a manifest anywhere there is no step of ours.
    run = run or ""
    found: list[places.Place] = [
        # A run may have saved nothing yet.
        places.at_steps(steps, run=run)
        if is_run(path)
        else places.at_path(path, run=run)
        for path, steps in zip(paths, of_runs, strict=True)
    ]
    with contextlib.ExitStack() as closing:
        if arguments.peer:
            from elastic_ckpt.tiers.peers import peer_client, secret

            client = closing.enter_context(
                peer_client.PeerClient(
                    secret.read(_secret_file(arguments, paths)),
                    tls_ca=arguments.tls_authority,
                )
            )
            found += [places.at_peer(url, client, run=run) for url in arguments.peer]
        yield run, places.Places(found)


def _secret_file(arguments: argparse.Namespace, paths: list[str]) -> str:
    from elastic_ckpt.tiers.peers import secret

    candidates = [arguments.secret_file] if arguments.secret_file else []
    candidates += [path for path in map(secret.path, paths) if os.path.exists(path)]
    if not candidates:
        raise errors.ConfigError(
            "--peer needs the run's secret: add --secret-file FILE (RAM_DISK/secret on"
            " any machine of the run)"
        )
    return candidates[0]
