"""The peer tier: the RAM disks of other machines, read through their agents.

Responses of a peer are untrusted: sizes are bounded, manifests are validated in full,
and values are used only after the caller has compared their digests.
"""

from __future__ import annotations

import functools
import json
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

from elastic_ckpt.core import background, checked_json
from elastic_ckpt.steps import manifest, manifest_file
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import peer_client
from elastic_ckpt.tiers.peers.peer_client import Endpoint

MOST_LISTING_BYTES = 4 * 2**20
MOST_MANIFEST_BYTES = 64 * 2**20
# The limit for one step at one peer: processes of a machine, times saves.
MOST_MANIFESTS = 256
# At one peer, the newest ones: each costs at least a request when no newer is complete.
MOST_STEPS = 256
# Manifests of one peer that cannot be read: from then on it is asked for no more. A few
# are honest: steps are removed between the listing and the reading.
MOST_UNREADABLE = 8
_MOST_THREADS = 32
Result = TypeVar("Result")
# The URL of an agent, the path of a manifest there, and its size and time.
ManifestKey = tuple[str, str, int, float]


class _Listed(NamedTuple):
    slot: str
    step: int
    save: str
    name: str
    # Of the file; None from agents that do not list them.
    size: int | None = None
    mtime: float | None = None

    @property
    def directory(self) -> str:
        return f"{self.slot}/{StepId(self.step, self.save)}"


class _Listing(NamedTuple):
    of_step: Mapping[int, list[_Listed]]
    problems: Sequence[str]
    is_refused: bool = False


class PeerSource:
    """The files of one step in one slot of a peer's RAM disk, a `source.Source`.

    Args:
      endpoint: of its agent.
      directory: `<slot>/<step>-<save>`.
      is_patient: whether to wait for a slow agent; see `source.RemoteSource`.
    """

    def __init__(
        self, endpoint: Endpoint, directory: str, *, is_patient: bool = False
    ) -> None:
        self._endpoint = endpoint
        self._directory = directory
        self._is_patient = is_patient
        self.directory = f"{endpoint.url}/v1/hosts/{directory}"

    def read_into(
        self,
        file: str,
        offset: int,
        into: memoryview,
        on_piece: source.OnPiece = source.ignored,
    ) -> None:
        """See `source.Source`."""
        path = _path(f"{self._directory}/{file}")
        self._endpoint.read_into(
            path, offset, into, on_piece, is_patient=self._is_patient
        )

    def size(self, file: str) -> int:
        """See `source.Source`."""
        path = _path(f"{self._directory}/{file}")
        return self._endpoint.size(path, is_patient=self._is_patient)

    def patiently(self) -> PeerSource:
        """See `source.RemoteSource`."""
        return PeerSource(self._endpoint, self._directory, is_patient=True)

    def put_right(self, file: str, content: bytes) -> None:
        """Has the agent replace a bad copy; see `source.RepairableSource`."""
        self._endpoint.put(_path(f"{self._directory}/{file}"), content)


class Peer:
    """The RAM disk of one other machine at one moment, a `source.Tier`.

    It is asked for its list of steps once, when that is first needed, however many
    steps it lists. Another object asks again. Not to be called from several threads.

    Args:
      url: of its agent.
      client: of this process.
      run: whose steps are wanted.
      is_patient: whether to wait for its agent if that is slow, because nobody else can
        tell what is in its memory.
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
        is_patient: bool = False,
        known: MutableMapping[ManifestKey, manifest.Manifest] | None = None,
    ) -> None:
        self.url = url
        self._known = {} if known is None else known
        self._is_patient = is_patient
        self._endpoint = client.endpoint(url)
        self._run = run
        self._num_unreadable = 0

    def steps(self) -> Sequence[int]:
        """See `source.Tier`; empty if the peer fails, which `offers` then reports.

        If a peer lists more than `MOST_STEPS` steps, these are the newest.
        """
        return sorted(self._listing.of_step)

    def known_saves(self) -> Sequence[StepId]:
        """See `source.Tier`; for the steps that `steps` returns."""
        of_step = self._listing.of_step
        return sorted(
            {
                StepId(step, each.save)
                for step, listed in of_step.items()
                for each in listed
            }
        )

    @property
    def problems(self) -> Sequence[str]:
        """Why its list of steps could not be read, or not all of it."""
        return self._listing.problems

    @property
    def is_refused(self) -> bool:
        """Whether the agent does not take the secret that this process has."""
        return self._listing.is_refused

    def offers(self, step: int) -> source.Offered:
        """See `source.Tier`."""
        sources: dict[Offer, source.Source] = {}
        problems = list(self._listing.problems)
        listed_manifests = self._listing.of_step.get(step, [])
        if len(listed_manifests) > MOST_MANIFESTS:
            problems.append(
                f"{self._endpoint.url} lists {len(listed_manifests)} manifests of step"
                f" {step}; the first {MOST_MANIFESTS} are read"
            )
        for listed in listed_manifests[:MOST_MANIFESTS]:
            if self._num_unreadable >= MOST_UNREADABLE:
                problems.append(
                    f"{self._endpoint.url} was not asked for more manifests:"
                    f" {self._num_unreadable} of them could not be read"
                )
                break
            try:
                offer = Offer(tier="local", manifest=self._manifest(listed))
            except (checked_json.UnreadableError, source.ReadError) as error:
                self._num_unreadable += 1
                problems.append(
                    f"manifest {listed.directory}/{listed.name} of"
                    f" {self._endpoint.url} {error}"
                )
            else:
                sources[offer] = PeerSource(self._endpoint, listed.directory)
        return source.Offered(sources, problems)

    @functools.cached_property
    def _listing(self) -> _Listing:
        try:
            listed_manifests = self._read_listing()
        except source.ReadError as error:
            is_refused = isinstance(error, source.RefusedError)
            return _Listing({}, [f"the list of steps {error}"], is_refused)
        of_step: dict[int, list[_Listed]] = {}
        for listed in listed_manifests:
            of_step.setdefault(listed.step, []).append(listed)
        newest = sorted(of_step, reverse=True)[:MOST_STEPS]
        problems = []
        if len(of_step) > MOST_STEPS:
            problems.append(
                f"{self._endpoint.url} lists {len(of_step)} steps; the newest"
                f" {MOST_STEPS} are looked at"
            )
        return _Listing({step: of_step[step] for step in newest}, problems)

    def _read_listing(self) -> list[_Listed]:
        text = self._read("/v1/steps", most_bytes=MOST_LISTING_BYTES)
        try:
            return [_listed(each) for each in json.loads(text)]
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise source.ReadError(
                f"cannot be read: {self._endpoint.url} sends something else"
                f" ({type(error).__name__})"
            ) from None

    def _read(self, path: str, *, most_bytes: int) -> bytes:
        return self._endpoint.read(
            path, most_bytes=most_bytes, is_patient=self._is_patient
        )

    def _manifest(self, listed: _Listed) -> manifest.Manifest:
        file = f"{listed.directory}/{listed.name}"
        if listed.size is None or listed.mtime is None:
            return self._read_manifest(file, listed)
        # A manifest is replaced when copies have arrived.
        key = (self.url, file, listed.size, listed.mtime)
        if key not in self._known:
            self._known[key] = self._read_manifest(file, listed)
        return self._known[key]

    def _read_manifest(self, file: str, listed: _Listed) -> manifest.Manifest:
        path = _path(file)
        text = self._read(path, most_bytes=MOST_MANIFEST_BYTES)
        try:
            parsed = manifest_file.parse(text)
        except RecursionError:
            raise checked_json.UnreadableError("is nested too deeply") from None
        actual = (
            parsed.run,
            parsed.step,
            parsed.save,
            manifest_file.file_name(parsed.host.id),
        )
        expected = (self._run, listed.step, listed.save, listed.name)
        if actual != expected:
            raise checked_json.UnreadableError(
                f"is that of run, step, save and file {actual!r:.400}, not of"
                f" {expected}"
            )
        return parsed


class Peers:
    """Many peers as one `source.Tier`, asked at the same time.

    One that fails costs its time-out once, is left alone for a while (see
    `peer_client`), and is among the problems all the while.

    Args:
      peers: any number.
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
        return source.merged(self._of_each(lambda peer: peer.offers(step)))

    def refusing(self) -> list[str]:
        """The urls of agents that do not take the secret that this process has."""
        return [peer.url for peer in self._peers if peer.is_refused]

    def _of_each(self, ask: Callable[[Peer], Result]) -> Iterable[Result]:
        num_threads = max(1, min(_MOST_THREADS, len(self._peers)))
        with background.pool(num_threads, "peers") as executor:
            return list(executor.map(ask, self._peers))


def _listed(each: dict[str, Any]) -> _Listed:
    listed = _Listed(
        slot=each["slot"],
        step=each["step"],
        save=each["save"],
        name=each["manifest"],
        size=_number(each, "bytes"),
        mtime=_number(each, "mtime"),
    )
    right = isinstance(listed.slot, str) and isinstance(listed.name, str)
    step = StepId.parse(f"{listed.step}-{listed.save}")
    if not right or step != (listed.step, listed.save):
        raise ValueError("not a step")
    return listed


def _number(each: dict[str, Any], name: str) -> Any:
    number = each.get(name)
    return number if isinstance(number, int | float) else None


def _path(file: str) -> str:
    # A name is encoded once, and decoded once by the agent.
    names = [urllib.parse.quote(name, safe="") for name in file.split("/")]
    return "/v1/hosts/" + "/".join(names)
