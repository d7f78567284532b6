"""The tiers that a configuration asks for."""

from __future__ import annotations

import os
import re

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.steps import failure_domains, layout
from elastic_ckpt.steps.best_steps import BestN
from elastic_ckpt.steps.retention import PreservationPolicy
from elastic_ckpt.tiers.choices import Local, Peers, Persistent, Tier, TlsFiles
from elastic_ckpt.tiers.peers import agent_url

_QUANTITY = re.compile(r"([1-9]\d*)([KMGT]i?)?")
_UNITS = {"": 1} | {
    unit + i: (1024 if i else 1000) ** power
    for power, unit in enumerate("KMGT", start=1)
    for i in ("", "i")
}


def tiers(config: schema.Config, *, persistent: epath.PathLike) -> list[Tier]:
    """The local, peer and persistent tier of a run, or the persistent one alone.

    Args:
      config: of the run.
      persistent: the directory of the run's checkpoints in persistent storage.

    Raises:
      ConfigError: if keys are missing or exclude each other.
    """
    section = config.tiers
    keep = preservation(config.checkpoint)
    if not section.enable_multi_tier_checkpointing:
        period = config.checkpoint.checkpoint_period
        return [Persistent(persistent, every=period, keep=keep)]
    directory, period = (
        section.local_checkpoint_directory,
        section.local_checkpoint_period,
    )
    if not directory or not period:
        raise errors.ConfigError(
            "enable_multi_tier_checkpointing=true with"
            f" local_checkpoint_directory={directory!r} and"
            f" local_checkpoint_period={period}: both are needed; set them, for example"
            " to /dev/shm and 10"
        )
    minutes, steps = _backup_interval(section)
    return [
        Local(
            ram_directory(config),
            every=period,
            limit_bytes=num_bytes(section.local_checkpoint_size_limit),
        ),
        _peers(section),
        Persistent(persistent, every=steps, every_minutes=minutes, keep=keep),
    ]


def preservation(section: schema.CheckpointSection) -> PreservationPolicy | None:
    """Which steps persistent storage keeps; None keeps all.

    Raises:
      ConfigError: if `checkpoint_steps_to_keep` is not a list of steps.
    """
    policies = ocp.training.preservation_policies
    steps = pinned_steps(section)
    newest = section.max_num_checkpoints_to_keep
    if not newest:
        return None
    kept: list[PreservationPolicy] = [policies.LatestN(newest)]
    if section.num_best_checkpoints_to_keep:
        kept.append(best_steps(section))
    if steps:
        kept.append(policies.CustomSteps(steps))
    return kept[0] if len(kept) == 1 else policies.AnyPreservationPolicy(kept)


def pinned_steps(section: schema.CheckpointSection) -> list[int]:
    """The steps that storage keeps whatever comes after them.

    Raises:
      ConfigError: if `checkpoint_steps_to_keep` is not a list of steps.
    """
    names = [each for each in section.checkpoint_steps_to_keep.split(";") if each]
    if not all(each.strip().isdecimal() for each in names):
        raise errors.ConfigError(
            f"checkpoint_steps_to_keep={section.checkpoint_steps_to_keep!r} is not a"
            " list of steps; write 1000;5000"
        )
    return [int(each) for each in names]


def best_steps(section: schema.CheckpointSection) -> BestN:
    """The policy that ranks steps by their evaluations."""
    return BestN(
        section.num_best_checkpoints_to_keep,
        metric=section.best_checkpoint_metric,
        higher_is_better=section.best_checkpoint_mode == "max",
    )


def ram_directory(config: schema.Config) -> str:
    """The directory of a run in the RAM of each of its machines."""
    return os.path.join(config.tiers.local_checkpoint_directory, config.run.run_name)


def ram_directories(config: schema.Config) -> list[str]:
    """All directories of a run in the RAM of this machine, whatever its slices are."""
    name = config.run.run_name
    base = config.tiers.local_checkpoint_directory
    numbers = range(config.world.slices)
    return [
        ram_directory(config),
        *(
            os.path.join(layout.slice_directory(base, number), name)
            for number in numbers
        ),
    ]


def num_bytes(quantity: str) -> int:
    """The bytes of an amount of memory as Kubernetes writes it: `64Gi`, `512Mi`.

    Raises:
      ConfigError: if it is none.
    """
    match = _QUANTITY.fullmatch(quantity)
    if not match:
        raise errors.ConfigError(
            f"local_checkpoint_size_limit={quantity!r} is not an amount of memory;"
            " write 64Gi or 512Mi"
        )
    return int(match[1]) * _UNITS[match[2] or ""]


def _backup_interval(section: schema.TiersSection) -> tuple[float | None, int | None]:
    minutes = section.multi_tier_checkpointing_backup_interval_minutes
    steps = section.multi_tier_checkpointing_backup_interval_steps
    if bool(minutes) == bool(steps):
        raise errors.ConfigError(
            "set either multi_tier_checkpointing_backup_interval_minutes or"
            " multi_tier_checkpointing_backup_interval_steps, not"
            f" {'both' if minutes else 'neither'}: it is the interval between backups"
            " to persistent storage"
        )
    return minutes or None, steps or None


def _peers(section: schema.TiersSection) -> Peers:
    tls = None
    given = [
        section.peer_tls_certificate,
        section.peer_tls_key,
        section.peer_tls_ca,
    ]
    if any(given):
        if not all(given):
            raise errors.ConfigError(
                f"peer_tls_certificate, peer_tls_key and peer_tls_ca are {given}: only"
                " some of them are set; set all three, or none to send unencrypted"
            )
        certificate, key, authority = given
        tls = TlsFiles(certificate=certificate, key=key, authority=authority)
    urls = {
        name: tuple(url for url in getattr(section, name).split(";") if url)
        for name in ("peer_urls", "peer_backup_urls")
    }
    for name, of_key in urls.items():
        for url in of_key:
            agent_url.check(url, what=name, needs_tls=tls is not None)
    if urls["peer_backup_urls"] and not section.peer_secret_file:
        raise errors.ConfigError(
            "peer_backup_urls needs peer_secret_file: backup hosts do not take part"
            " when the hosts choose a secret; set it to a file with the secret of the"
            " backup hosts"
        )
    bandwidth = section.peer_max_mib_per_sec * 2**20
    return Peers(
        copies=section.peer_copies,
        assume_data_parallelism=section.peer_assume_data_parallelism,
        domain=section.peer_domain,
        domains=failure_domains.parse(section.peer_domains, what="peer_domains"),
        interface=section.peer_interface or None,
        port=section.peer_port,
        known=urls["peer_urls"],
        backups=urls["peer_backup_urls"],
        secret_file=section.peer_secret_file or None,
        max_bytes_per_sec=bandwidth or None,
        timeout_secs=section.peer_timeout_secs,
        tls=tls,
    )
