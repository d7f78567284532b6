"""Checks that all hosts have the same software, data and tiers, before they are used.

Colocated Python sends code with cloudpickle, which needs the same Python minor version
and the same JAX on both sides. Rows depend on Grain, on this package and on each host's
files. Workers on accelerator hosts send these facts to the head; controllers exchange
them through JAX's coordination service.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from jax.sharding import Mesh

from elastic_ckpt.core import allgather, digest, errors, topology
from elastic_ckpt.data import elastic_data

Facts = dict[str, str]

# The fact with the host name; all other facts must be the same.
HOST = "host"
PIPELINE = "pipeline"

# NumPy is included because it shuffles the records; the packages from `tokenizers` on,
# if installed, because they determine tokens.
_PACKAGES = (
    *("jax", "jaxlib", "grain", "numpy", "elastic-ckpt"),
    *("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pyarrow"),
)
# A controller may still be writing its dataset, so the others wait for a day.
_PATIENCE_SECS = 24 * 3600.0


def local_facts(
    data: elastic_data.ElasticData | None = None, *, role: str = ""
) -> Facts:
    """Returns the facts about this host.

    Args:
      data: the data, if the facts should include a digest, 16 hex digits, of the
        settings that determine the order of its examples.
      role: a name to use instead of the host index, for a single controller's head.
    """
    facts = {
        HOST: f"{role} ({platform.node()[:64]})" if role else host_name(),
        "Python": ".".join(map(str, sys.version_info[:2])),
        **versions(),
    }
    if data is not None:
        facts[PIPELINE] = digest.json_digest([data.engine, data.identity()])[:16]
    return facts


@functools.cache
def versions() -> Facts:
    """The versions of the packages that determine the order of examples."""
    found = {}
    for each in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            # Drops a local suffix, which an image may add ("0.10.0+patched").
            found[each] = metadata.version(each).partition("+")[0]
    return found


def host_name() -> str:
    """This host's index and name, used in error messages."""
    return f"host {topology.this_host()} ({platform.node()[:64]})"


def check_controllers(data: elastic_data.ElasticData, mesh: Mesh) -> None:
    """Compares the facts of all controllers, which must all call this function.

    Raises:
      ConfigError: see `check`.
      RunError: if a controller does not call this function within a day.
    """
    controllers = sorted({device.process_index for device in mesh.devices.flat})
    messages = allgather.shared(tuple(controllers))
    check(messages.gather("facts", local_facts(data), timeout_secs=_PATIENCE_SECS))


def check(facts: Sequence[Facts]) -> None:
    """Raises a ConfigError that lists the facts that differ between hosts.

    A fact that a host lacks is not compared.
    """
    differing = []
    for name in {*itertools.chain(*facts)} - {HOST}:
        hosts: dict[str, dict[str, None]] = {}
        for each in facts:
            if name in each:
                # A host may appear more than once: it reports once per device.
                hosts.setdefault(each[name], {})[each[HOST]] = None
        if len(hosts) > 1:
            found = (f"{value} on {errors.first_of(on)}" for value, on in hosts.items())
            differing.append(f"{name} is {', '.join(found)}")
    if differing:
        raise errors.ConfigError(
            f"the hosts of this run differ: {'; '.join(sorted(differing))}. Install the"
            " same versions on every host and in the sidecar's image; if anything else"
            " differs, use the same arguments, configuration and files on every host"
        )
