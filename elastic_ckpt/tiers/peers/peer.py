"""The peer tier: the RAM disks of other machines, read through their agents.

Responses of a peer are untrusted: sizes are bounded, manifests are validated in full,
and values are used only after the caller has compared their digests.
"""

from __future__ import annotations

import functools
import json
import urllib.parse
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import NamedTuple, TypeVar

from elastic_ckpt.core import background, checked_json
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.manifest import Leaf, manifest_name
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import peer_client
from elastic_ckpt.tiers.peers.peer_client import Endpoint

MOST_LISTING_BYTES = 4 * 2**20
MOST_MANIFEST_BYTES = 64 * 2**20
_MOST_THREADS = 32
T = TypeVar("T")
# The URL of an agent, the path of a manifest there, and its size and time.
ManifestKey = tuple[str, str, int, float]


class _Listing(NamedTuple):
    machine: str
    # The path, size and time of each manifest, by step.
    manifests: dict[StepId, list[tuple[str, int, float]]]
    problems: Sequence[str]
    is_refused: bool


class PeerSource:
    """The files of one step in one slot of a peer's RAM disk, a `source.Source`.

    Args:
      endpoint: of its agent.
      directory: `<slot>/<step>-<save>`.
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
    ) -> None:
        """See `source.Source`."""
        self._endpoint.read_into(self._of(leaf, box), 0, into, on_piece)

    def size(self, leaf: Leaf, box: Box) -> int:
        """See `source.Source`."""
        return self._endpoint.size(self._of(leaf, box))

    def put_right(self, leaf: Leaf, box: Box, content: bytes) -> None:
        """Has the agent replace a bad copy; see `source.RepairableSource`."""
        self._endpoint.put(self._of(leaf, box), content)

    def _of(self, leaf: Leaf, box: Box) -> str:
        # A name is encoded once, and decoded once by the agent.
        return urllib.parse.quote(self._path + layout.part_file(leaf, box))


class Peer:
    """The RAM disk of one other machine at one moment, a `source.Tier`.

    It is asked for its list of steps once, when that is first needed. Another object
    asks again. Not to be called from several threads.

    Args:
      url: of its agent.
      client: of this process.
      run: whose steps are wanted.
      known: manifests that were read by other objects, which are not read again; what
        this one reads is added.

    Attributes:
      url: as given.
    """

    def __init__(
        self,
        url: str,
        client: peer_client.PeerClient,
        run: str,
        *,
        known: MutableMapping[ManifestKey, manifest.Manifest] | None = None,
    ) -> None:
        self.url, self._run = url, run
        self._known = {} if known is None else known
        self._endpoint = client.endpoint(url)

    @property
    def machine(self) -> str:
        """The ID of its memory; empty if the peer fails."""
        return self._listing.machine

    def steps(self) -> Sequence[int]:
        """See `source.Tier`; empty if the peer fails, which `offers` then reports."""
        return sorted({each.step for each in self._listing.manifests})

    def known_saves(self) -> Sequence[StepId]:
        """See `source.Tier`."""
        return sorted(self._listing.manifests)

    @property
    def problems(self) -> Sequence[str]:
        """Why its list of steps could not be read."""
        return self._listing.problems

    @property
    def is_refused(self) -> bool:
        """Whether the agent does not take the secret that this process has."""
        return self._listing.is_refused

    def offers(self, step: int) -> source.Offered:
        """See `source.Tier`."""
        copies: list[source.Copy] = []
        problems = list(self._listing.problems)
        for step_id, listed in self._listing.manifests.items():
            for each in listed if step_id.step == step else ():
                try:
                    there = self._manifest(step_id, *each).at("local", self.url)
                except (checked_json.UnreadableError, source.ReadError) as error:
                    problems.append(f"manifest {each[0]} of {self.url} {error}")
                else:
                    directory = each[0].rpartition("/")[0]
                    parts = PeerSource(self._endpoint, directory)
                    copies.append(source.Copy(there, parts))
        return source.Offered(copies, problems)

    @functools.cached_property
    def _listing(self) -> _Listing:
        try:
            text = self._endpoint.read("/steps", most_bytes=MOST_LISTING_BYTES)
            return _parsed(text)
        except source.ReadError as error:
            is_refused = isinstance(error, source.RefusedError)
            return _Listing("", {}, [f"the list of steps {error}"], is_refused)
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            problem = (
                f"the list of steps cannot be read: {self.url} sends something else"
                f" ({type(error).__name__})"
            )
            return _Listing("", {}, [problem], is_refused=False)

    def _manifest(
        self, step_id: StepId, path: str, size: int, mtime: float
    ) -> manifest.Manifest:
        # A manifest is replaced when copies have arrived.
        key = (self.url, path, size, mtime)
        if key in self._known:
            return self._known[key]
        text = self._endpoint.read(
            f"/hosts/{urllib.parse.quote(path)}", most_bytes=MOST_MANIFEST_BYTES
        )
        try:
            parsed = manifest.Manifest.parse(text)
        except RecursionError:
            raise checked_json.UnreadableError("is nested too deeply") from None
        name = manifest_name(parsed.host.id)
        actual = (parsed.run, *parsed.step_id, name)
        expected = (self._run, *step_id, path.rpartition("/")[2])
        if actual != expected:
            raise checked_json.UnreadableError(
                f"is that of run, step, save and file {actual!r:.400}, not of"
                f" {expected}"
            )
        return self._known.setdefault(key, parsed)


class Peers:
    """Many peers as one `source.Tier`, asked at the same time.

    One that fails costs its time limit once, is left alone for a while (see
    `peer_client`), and is among the problems all the while.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers

    def steps(self) -> Sequence[int]:
        """See `source.Tier`."""
        return sorted({step for steps in self._of_each(Peer.steps) for step in steps})

    def known_saves(self) -> Sequence[StepId]:
        """See `source.Tier`."""
        saves = self._of_each(Peer.known_saves)
        return sorted({each for of_peer in saves for each in of_peer})

    def offers(self, step: int) -> source.Offered:
        """See `source.Tier`."""
        several = list(self._of_each(lambda peer: peer.offers(step)))
        return source.Offered(
            [copy for each in several for copy in each.copies],
            [problem for each in several for problem in each.problems],
        )

    def refusing(self) -> list[str]:
        """The URLs of agents that do not take the secret that this process has."""
        return [peer.url for peer in self._peers if peer.is_refused]

    def _of_each(self, ask: Callable[[Peer], T]) -> Iterable[T]:
        num_threads = max(1, min(_MOST_THREADS, len(self._peers)))
        with background.pool(num_threads, "peers") as executor:
            return list(executor.map(ask, self._peers))


def _parsed(text: bytes) -> _Listing:
    listing = json.loads(text)
    manifests: dict[StepId, list[tuple[str, int, float]]] = {}
    for path, size, mtime in listing["manifests"]:
        _, directory, _ = str(path).split("/")
        step_id = StepId.parse(directory)
        if step_id is None:
            raise ValueError("not a step")
        manifests.setdefault(step_id, []).append((path, int(size), float(mtime)))
    return _Listing(str(listing["machine"]), manifests, [], is_refused=False)
