"""Failure domains as text, `rack=r7;zone=us-east5-a`, in configs and environments.

A config applies to all hosts; an environment variable names the domains of one host. A
Kubernetes pod gets its zone in this way (`configs/deploy`), and others from its node's
agent.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.steps.manifest import Host

VARIABLE = "ELASTIC_CKPT_DOMAINS"
# The kinds of which `kind_of` chooses by default.
DEFAULT = "zone;block;rack;slice"
_MOST_SHARE = 0.6


def parse(text: str, *, what: str) -> dict[str, str]:
    """Parses the names of domains, by kind; a kind without a name is left out.

    Args:
      text: pairs, separated by `;`.
      what: the setting whose value it is, for messages.

    Raises:
      ConfigError: if the text has another form.
    """
    names = {}
    for pair in filter(None, text.split(";")):
        kind, equals, name = pair.partition("=")
        if not (kind and equals):
            raise errors.ConfigError(
                f"{what}={text!r}: {pair!r} is not `kind=name`; write for example"
                " rack=r7;zone=us-east5-a"
            )
        if name:
            names[kind] = name
    return names


def of_environment() -> dict[str, str]:
    """Returns the domains that this host's environment names.

    Raises:
      ConfigError: as `parse`.
    """
    return parse(os.environ.get(VARIABLE, ""), what=VARIABLE)


def smallest(kinds: str) -> str:
    """The last of some kinds, which counts where no larger one does."""
    return kinds.rpartition(";")[2]


def inner_kind(hosts: Sequence[Host], kinds: str, outer: str) -> str:
    """The smallest kind, if it is not `outer` and each host has a domain of it.

    Args:
      hosts: of a world.
      kinds: from large to small, separated by `;`.
      outer: the kind that `kind_of` chose.

    Returns:
      The kind, or an empty text.
    """
    inner = smallest(kinds)
    is_another = inner != outer and all(inner in host.domains for host in hosts)
    return inner if is_another else ""


def kind_of(hosts: Sequence[Host], kinds: str) -> str:
    """Chooses the kind of failure domain that one copy of everything is outside of.

    The larger the kind, the greater the loss that is survived. But if most hosts were
    in one domain, the copies of all of them would fill the memory of the few outside.

    Args:
      hosts: of a world.
      kinds: from large to small, separated by `;`.

    Returns:
      The first kind of which every host has a domain, and no domain more than
      `_MOST_SHARE` of the hosts; the last kind if there is none.
    """
    for kind in kinds.split(";"):
        counts = collections.Counter(host.domains.get(kind) for host in hosts)
        largest = max(counts.values(), default=0)
        if None not in counts and 0 < largest <= _MOST_SHARE * len(hosts):
            return kind
    return smallest(kinds)
