"""The peer tier: other machines' RAM disks, read through their agents.

A peer's responses are untrusted: sizes are bounded, manifests are fully validated, and
callers use values only after comparing their digests.
"""

from __future__ import annotations

import functools
import json
import urllib.parse
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from elastic_ckpt.core import checked_json, codec
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.manifest import Leaf, manifest_name
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers.peer_client import Endpoint, PeerClient

MOST_LISTING_BYTES = 4 * 2**20
MOST_MANIFEST_BYTES = 64 * 2**20
# A manifest's path relative to `hosts`.
_PATH = r"^[0-9]+/(0|[1-9][0-9]*)-[^/]+/[^/]+$"
# Errors that decoding raises for content that is not a valid list.
_OTHER = (KeyError, RecursionError, TypeError, ValueError)


class Listed(NamedTuple):
    """A manifest in an agent's list; its time changes whenever it is rewritten."""

    path: Annotated[str, msgspec.Meta(pattern=_PATH)]
    size: int
    mtime: float

    @property
    def step_id(self) -> StepId:
        """The step that the manifest belongs to."""
        step, _, save = self.path.split("/")[1].partition("-")
        return StepId(int(step), save)


class Listing(NamedTuple):
    """An agent's manifests.

    Attributes:
      machine: the ID of the machine's memory; empty if the list could not be read.
      problem: a message that says why the list could not be read; empty if it was read.
      is_refused: whether the agent rejects this process's secret.
    """

    machine: str = ""
    manifests: Sequence[Listed] = ()
    problem: str = ""
    is_refused: bool = False


class PeerSource:
    """The files of one step in one slot of a peer's RAM disk, a `source.Source`.

    Args:
      directory: the step directory, `<slot>/<step>-<save>`.
    """

    def __init__(self, endpoint: Endpoint, directory: str) -> None:
        self._endpoint, self._path = endpoint, f"/hosts/{directory}/"
        self.directory = f"{endpoint.url}/hosts/{directory}"

    def read_into(
        self,
        leaf: Leaf,
        box: Box,
        into: memoryview,
        on_piece: source.OnPiece = source.ignored,
    ) -> int:
        """See `source.Source`."""
        return self._endpoint.read_into(self._of(leaf, box), into, on_piece)

    def repair(self, leaf: Leaf, box: Box, content: bytes) -> None:
        """Has the agent replace a bad copy; see `source.RepairableSource`."""
        self._endpoint.put(self._of(leaf, box), content)

    def _of(self, leaf: Leaf, box: Box) -> str:
        # Encoded exactly once, because the agent decodes it once.
        return urllib.parse.quote(self._path + layout.part_file(leaf, box))


class Peer:
    """The RAM disk of one other machine at one moment, a `source.SourceTier`.

    Requests the list of steps once, when it is first needed. A new object requests the
    list again and reads only new manifests. A failed peer delays the caller by one time
    limit; then the peer is skipped for a while (see `peer_client`) and treated as
    having no steps.

    Attributes:
      listing: returns the agent's manifests, which it requests the first time.
    """

    def __init__(self, url: str, client: PeerClient, run: str) -> None:
        self.url, self._run, self._endpoint = url, run, client.endpoint(url)
        # A `cached_property` of Python 3.11 has one lock for all peers, so that each
        # would wait for the lists of others; and a method of this object would keep it
        # until the next garbage collection, which training loops turn off.
        self.listing = functools.cache(functools.partial(_listing, self._endpoint))

    def known_saves(self) -> Sequence[StepId]:
        """See `source.SourceTier`; empty if the peer fails, which `offers` reports."""
        return sorted({each.step_id for each in self.listing().manifests})

    def offers(self, step: int) -> source.Offered:
        """See `source.SourceTier`."""
        held: list[source.HeldParts] = []
        problems = list(filter(None, [self.listing().problem]))
        for each in self.listing().manifests:
            if each.step_id.step == step:
                try:
                    held.append(self._held(each))
                except (checked_json.UnreadableError, source.ReadError) as error:
                    problems.append(f"manifest {each.path} of {self.url} {error}")
        return source.Offered(held, problems)

    def _held(self, listed: Listed) -> source.HeldParts:
        known, (directory, _, name) = (
            self._endpoint.manifests,
            listed.path.rpartition("/"),
        )
        if listed not in known:
            text = self._endpoint.read(
                f"/hosts/{urllib.parse.quote(listed.path)}",
                most_bytes=MOST_MANIFEST_BYTES,
            )
            parsed = manifest.Manifest.parse(text)
            actual = parsed.run, parsed.step_id, manifest_name(parsed.host.id)
            if actual != (self._run, listed.step_id, name):
                raise checked_json.UnreadableError(
                    f"has run, step and file {actual!r:.400}, which do not"
                    f" match run {self._run!r} and the manifest's path"
                )
            known[listed] = parsed
        there = known[listed].at("local", self.url)
        return source.HeldParts(there, PeerSource(self._endpoint, directory))


def _listing(endpoint: Endpoint) -> Listing:
    try:
        text = endpoint.read("/steps", most_bytes=MOST_LISTING_BYTES)
        fields = json.loads(text)
        manifests = codec.decode(list[Listed], fields["manifests"])
        machine = str(fields["machine"])
    except source.ReadError as error:
        return Listing(
            problem=f"the list of steps {error}",
            is_refused=isinstance(error, source.RefusedError),
        )
    except _OTHER:
        return Listing(
            problem=f"the list of steps cannot be read: {endpoint.url} sends something"
            " else"
        )
    # Drops manifests that are no longer listed.
    listed, known = set(manifests), endpoint.manifests.items()
    endpoint.manifests = {name: of for name, of in known if name in listed}
    return Listing(machine, manifests)
