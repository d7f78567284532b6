"""Failure domains as text, `rack=r7;zone=us-east5-a`, in configs and environments.

A config applies to all hosts; an environment variable names the domains of one host. A
Kubernetes pod gets the labels of its node in this way (`deploy` does it for the zone).
"""

from __future__ import annotations

import os

from elastic_ckpt.core import errors

VARIABLE = "ELASTIC_CKPT_DOMAINS"


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
