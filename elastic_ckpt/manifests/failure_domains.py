"""Failure domains as text, `rack=r7;zone=us-east5-a`, in configs and environments.

An environment says it of one host, where a config is of all: a Kubernetes pod gets the
labels of its node in that way (`deploy` does it for the zone).
"""

from __future__ import annotations

import os

from elastic_ckpt.core import errors

VARIABLE = "ELASTIC_CKPT_DOMAINS"


def parse(text: str, *, what: str) -> dict[str, str]:
    """The names of domains, by kind; a kind without a name is left out.

    Args:
      text: pairs, separated by `;`.
      what: it is the value of, for messages.

    Raises:
      ConfigError: if it is something else.
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
    """Those that this host's environment names.

    Raises:
      ConfigError: as `parse`.
    """
    return parse(os.environ.get(VARIABLE, ""), what=VARIABLE)
