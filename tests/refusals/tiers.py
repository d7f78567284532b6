"""Mistakes in the tiers of a checkpointer, and at agents and steps in storage."""

import functools
import re

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.peers import agent, agent_server, peer_client, secret
from elastic_ckpt.tiers.persistent import leases
from tests.refusals import Refusal, row
from tests.tiers import served

LOCAL = choices.Local("/ram/run")
TLS = choices.TlsFiles(certificate="a.pem", key="a.pem", authority="b.pem")
persistent = functools.partial(choices.Persistent, "/steps")
local = functools.partial(choices.Local, "/ram")

# Wrong settings of a tier: the message begins with the setting.
SETTINGS = [
    (choices.Local, {"directory": ""}),
    (local, {"every": 0}),
    (local, {"limit_bytes": 0}),
    (local, {"keep": 3}),
    (choices.Persistent, {"directory": " "}),
    (persistent, {"every": -5}),
    (persistent, {"keep": "LatestN"}),
    (persistent, {"every_minutes": 0}),
    (persistent, {"every_minutes": float("nan")}),
    (persistent, {"save_decision_policy": 5}),
    (choices.Peers, {"copies": -1}),
    (choices.Peers, {"max_bytes_per_sec": -1}),
    (functools.partial(choices.TlsFiles, key="a", authority="b"), {"certificate": ""}),
]
URLS = [
    *("10.0.0.7:8470/v1/r", "http://", "http://a:8470", "http://a:8470/v1/"),
    *("http://a:0/v1/r", "http://a:65536/v1/r", "http://a:port/v1/r"),
    *("http://a:1/v1/r/steps", "http://a:1/v1/r?secret=x", "http://user:word@a:1/v1/r"),
    *(
        "http://a b:1/v1/r",
        "http://a:1/v1/r\n",
        "ftp://a:1/v1/r",
        "http://[fd00:1/v1/r",
    ),
    *(b"http://a:8470/v1/r", None),
]


def _link(path):
    (path / "link").symlink_to(path / "ram", target_is_directory=True)
    stored = choices.Persistent(path / "link" / "steps", every=1)
    choices.Chosen.from_choices([choices.Local(path / "ram"), stored])


def _serve(path, **options):
    with served.serving(agent.Service(root=str(path), **options)):
        pass


def _secret(path, content):
    secret.adopt(path, "x" * 32)
    (path / "secret").write_text(content)
    secret.read_or_create(path)


def _open_secret(path):
    secret.read_or_create(path)
    (path / "secret").chmod(0o640)
    secret.read_or_create(path)


def _setting(kind, given):
    ((name, value),) = given.items()
    tier = getattr(kind, "func", kind).__name__
    return row(kind)(rf"^{tier}\({name}={re.escape(repr(value))}\).*pass ", **given)


def _secrets(text):
    refused = row(_secret, error=errors.RunError, writes=True)
    return refused("does not contain a secret", text)


chosen = row(lambda *tiers: choices.Chosen.from_choices(list(tiers)))
local_tier, peers = row(choices.Local), row(choices.Peers)
serving = row(_serve, error=errors.RunError, writes=True)
NO_URL = "is not an agent URL; use the URL"

REFUSALS = {
    **{f"{kind}-{given}": _setting(kind, given) for kind, given in SETTINGS},
    **{f"URL {url}": peers(NO_URL, known=("http://a:1/v1/r", url)) for url in URLS},
    "one string for URLs": peers(
        r"known=.URL, ....*is not an agent URL", known="http://10.0.0.7:8470"
    ),
    "a URL that does not encrypt, with TLS": peers(
        "not an agent URL with https, which this run requires",
        **{"known": ("http://a:1/v1/r",), "tls": TLS},
    ),
    "a RAM disk in a bucket": local_tier(
        r"gs://bucket/ram'\) is not a direct", "gs://bucket/ram"
    ),
    "two intervals": chosen(
        "has every and every_minutes; pass exactly one of",
        persistent(every=1, every_minutes=2),
    ),
    "no interval": chosen("has no interval; pass exactly one of every=", persistent()),
    "a path for a tier": chosen(
        "contains Local, str; pass one ec.Local", LOCAL, "gs://bucket"
    ),
    "a tier twice": chosen("contains Local, Local; pass one ec.Local", LOCAL, LOCAL),
    "no tier": chosen("contains nothing; pass one ec.Local"),
    "storage inside of RAM": chosen(
        r"is inside Local\('/ram/run'\)",
        *(LOCAL, choices.Persistent("/ram/x/../run/steps", every=1)),
    ),
    "storage inside of RAM, behind a link": Refusal(
        _link, "is inside Local", writes=True
    ),
    "an agent for every network": serving(
        "address at which other machines reach", interface="0.0.0.0"
    ),
    "no certificate for an agent": serving(
        r"none\.pem.* certificate with its key", tls_certificate="/none.pem"
    ),
    "no certificate for a client": row(peer_client.PeerClient)(
        r"none\.pem", "x" * 32, tls_ca="/none.pem"
    ),
    "a secret that others can read": Refusal(
        _open_secret, "this user owns, with mode 0600", errors.RunError, writes=True
    ),
    **{
        f"the secret {text!r}": _secrets(text)
        for text in ("", "with a space in it", "é")
    },
    "outside of a pod": Refusal(
        lambda path: agent_server.read_labels("node-7", account_directory=str(path)),
        "--domains",
        errors.RunError,
    ),
    "a lease of no time": Refusal(
        lambda path: leases.lease(path / "1", duration_secs=0).__enter__(), "positive"
    ),
}
