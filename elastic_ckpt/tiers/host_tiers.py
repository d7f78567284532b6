"""All that one host does for the tiers, phase by phase, as it is asked.

Whoever drives (`checkpoint.hosts`) asks all hosts for a phase, and goes on with their
answers. Arguments and answers are JSON wherever no arrays are meant, so a host may be
in this process, or beside an accelerator under another controller.

A world begins with three phases: hosts `introduce` themselves, `join` with a name and
the secret that follow from that, and `meet` each other's agents. A save goes through
`capture`, `write`, `commit` (or `abandon`), `replicate` and `collect`; a backup through
`back_up` and `commit_backup`; a restore through `find`, `read`, `materialise` and
`repair`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import errors, host_memory, storage
from elastic_ckpt.tiers import (
    agent,
    agent_process,
    backup,
    capture,
    commit,
    find,
    known_agents,
    local,
    ocdbt,
    peer,
    peer_client,
    persistent,
    persistent_root,
    placement,
    ram_disk,
    read_plan,
    recovery,
    replication,
    retention,
    secret,
    step_writer,
    trees,
    upload,
    verified_read,
)
from elastic_ckpt.tiers.choices import Local, Peers, Persistent
from elastic_ckpt.tiers.holdings import Holdings, Offer
from elastic_ckpt.tiers.manifest import ComponentFile, Contents, Host
from elastic_ckpt.tiers.source import Source, Tier

Answer = dict[str, Any]


class HostTiers:
    """One host's RAM disk, its part in copying and backing up, and what it can read.

    Args:
      run: the identity of the run.
      number: of this host in its world, from 0.
      slice_name: the slice that it is in.
      local_tier: the local tier.
      peers: the peer tier.
      persistent_tier: None if there is none.
    """

    def __init__(
        self,
        *,
        run: str,
        number: int,
        slice_name: str,
        local_tier: Local,
        peers: Peers,
        persistent_tier: Persistent | None,
    ) -> None:
        self._run = run
        self._number = number
        self._slice_name = slice_name
        self._local_tier = local_tier
        self._peers = peers
        self._persistent_tier = persistent_tier
        self._disk = ram_disk.RamDisk(
            local_tier.directory, run=run, limit_bytes=local_tier.limit_bytes
        )
        self._persistent: persistent.PersistentTier | None = None
        if persistent_tier is not None:
            self._root = persistent_root.PersistentRoot.of(persistent_tier.directory)
            self._persistent = persistent.PersistentTier(self._root, run=run)
        self._pool = host_memory.Pool()
        self._saving: dict[tuple[int, str], _Saving] = {}
        self._restoring: _Restoring | None = None
        self._closing = contextlib.ExitStack()

    def introduce(self) -> Answer:
        """What the others need to know before this host has a name."""
        root = self._disk.root
        return {
            "machine": self._disk.machine,
            "secret": secret.find(root),
            "fresh_secret": secret.new(),
            "agents": known_agents.read(root),
        }

    def join(self, slots: Sequence[int], shared_secret: str) -> Answer:
        """Takes a slot of the machine, and the secret that all agreed on.

        Args:
          slots: of each host, by number.
          shared_secret: of the run.

        Returns:
          The `host` that this is from now on, and of slot 0 where its `agent` listens.
        """
        slot = slots[self._number]
        secret.adopt(self._disk.root, shared_secret)
        domains = {
            "host": self._disk.machine,
            "slice": self._slice_name,
            **self._peers.domains,
        }
        self._own = self._closing.enter_context(
            local.LocalHost(self._disk, slot=slot, domains=domains, number=self._number)
        )
        self._own.clean()
        # Under one controller all machines have to name it alike.
        self._restored_files = self._disk.host_directory(slot) / "restored"
        storage.remove(self._restored_files)
        listens = None
        if slot == 0:
            own_agent = agent_process.AgentProcess(self._service())
            self._closing.callback(own_agent.close)
            listens = own_agent.address
        return {
            "host": dataclasses.asdict(self._own.host),
            "agent": None if listens is None else dataclasses.asdict(listens),
        }

    def meet(self, hosts: Sequence[Answer], agents: Mapping[str, Answer]) -> None:
        """Learns who is there, and where agents listen, those of idle machines too."""
        self._hosts = [Host(**host) for host in hosts]
        known_agents.write(self._disk.root, agents)
        tls = self._peers.tls
        client = peer_client.PeerClient(
            secret.read(secret.path(self._disk.root)),
            tls_ca=None if tls is None else tls.authority,
            max_bytes_per_sec=self._peers.max_bytes_per_sec,
        )
        self._closing.enter_context(client)
        others = {
            each["url"]: each.get("certificate_sha256")
            for machine, each in agents.items()
            if machine != self._disk.machine
        }
        others.update({url: None for url in self._peers.known if url not in others})
        self._ram_tiers: list[Tier] = [
            self._disk,
            peer.Peers(
                [
                    peer.Peer(url, client, self._run, certificate_sha256=certificate)
                    for url, certificate in others.items()
                ]
            ),
        ]

    def new_save(self) -> str:
        """A name for the saves of this world, greater than those that were found."""
        # As text it has to grow, so it has always as many digits.
        return f"{max(time.time_ns() // 1_000_000, self._newest_save() + 1):015d}"

    def say(self, value: Any) -> Any:
        """`value`: for what drivers have to agree on."""
        return value

    # A save.

    def capture(self, step: int, save: str, of_trees: Mapping[str, Any]) -> str:
        """Copies what the devices of this host hold; see `Hosts.capture`.

        Raises:
          CheckpointError: if a leaf cannot be saved.
        """
        captured = capture.capture(trees.leaves(of_trees), self._pool)
        saving = _Saving(captured=captured)
        self._saving[step, save] = saving
        contents = Contents(leaves=captured.leaves, components={})
        try:
            saving.writer = self._own.begin(
                step, save, contents, num_bytes=captured.num_bytes
            )
        except errors.CheckpointError as error:
            # Others may have room: `write` says it to all.
            saving.problem = str(error)
        return str(self._disk.step_directory(self._own.slot, step, save))

    def write(
        self, step: int, save: str, components: Sequence[str], problem: str | None
    ) -> Answer:
        """Writes what was captured, and says what `files` components wrote.

        Raises:
          CheckpointError: if it does not fit, or `problem` says what went wrong.
        """
        saving = self._saving[step, save]
        problem = saving.problem or problem
        if problem is not None:
            raise errors.CheckpointError(problem)
        assert saving.writer is not None
        saving.writer.write(saving.captured)
        saving.captured.release()
        saving.written = saving.writer.component_files(components)
        names: dict[str, list[str]] = {}
        for file in saving.written:
            component, _, name = file.path.partition("/")
            names.setdefault(component, []).append(name)
        return {"files": names}

    def commit(
        self, step: int, save: str, parts: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Makes this host's part exist.

        Args:
          step: the training step.
          save: which save of it.
          parts: by component and file, the number of the part that a file is.
        """
        saving = self._saving.pop((step, save))
        assert saving.writer is not None
        files = []
        for file in saving.written:
            component, _, name = file.path.partition("/")
            part = parts[component][name]
            files.append(
                ComponentFile(
                    component=component,
                    parts=(part, part + 1),
                    path=file.path,
                    digest=file.digest,
                    stored_bytes=file.stored_bytes,
                )
            )
        counts = {component: len(of) for component, of in parts.items()}
        saving.writer.commit(files, components=counts)

    def abandon(self, step: int, save: str) -> None:
        """Takes back what this host wrote of a step, committed or not."""
        saving = self._saving.pop((step, save), None)
        if saving is None:
            self._own.remove(step, save)
            return
        saving.captured.release()
        if saving.writer is not None:
            saving.writer.abandon()

    def replicate(self, step: int, save: str) -> Answer:
        """Takes the copies that placement gives this host, and compares replicas.

        Returns:
          `copies` and their `bytes`, `problems`, and what `diverged`, by name.
        """
        sources, problems = self._offers(step, save)
        holdings = Holdings.of(list(sources))
        diverged = [_diverged(holdings, int(item)) for item in holdings.diverged]
        place = (
            placement.assume_data_parallelism
            if self._peers.assume_data_parallelism
            else placement.place
        )
        policy = placement.Policy(
            copies=self._peers.copies if len(self._hosts) > 1 else 0,
            domain=self._peers.domain,
        )
        placed = place(holdings, self._hosts, policy)
        problems += [each.why for each in placed.shortfalls]
        items = replication.incoming(placed, self._own.host)
        taken = replication.Taken(copies=0, num_bytes=0, problems=())
        if items:
            taken = self._take(holdings, items, sources)
        return {
            "copies": taken.copies,
            "bytes": taken.num_bytes,
            "problems": [*problems, *taken.problems],
            "diverged": diverged,
        }

    def collect(
        self, step: int, save: str, in_flight: Sequence[int]
    ) -> list[tuple[int, str]]:
        """Removes what is not needed now that a step is complete; what was removed."""
        held = self._own.held()
        newest = max(step, *(each.step for each in held)) if held else step
        removed = retention.steps_to_delete(
            [
                retention.HeldStep(
                    step=each.step, time=each.time, metrics=None, complete=True
                )
                for each in held
            ],
            self._local_tier.keep or retention.NewestOnly(),
            newest_complete=min(step, newest),
            in_flight=in_flight,
            preserved=(),
        )
        gone = [
            (each.step, each.save)
            for each in held
            if each.step in removed or (each.step == step and each.save < save)
        ]
        for each in gone:
            if each not in self._own.in_flight:
                self._own.remove(*each)
        return gone

    # A backup.

    def chunk_shapes(self, step: int, save: str) -> dict[str, list[int]]:
        """The shapes of the chunks of each leaf of a step, by its path."""
        sources, _ = self._offers(step, save)
        return _chunk_shapes(Holdings.of(list(sources)))

    def back_up(
        self, step: int, save: str, names: Mapping[str, Sequence[str]]
    ) -> Answer:
        """Writes this host's share of a step to persistent storage; its `bytes`.

        Args:
          step: the training step.
          save: which save of it.
          names: by the path of a leaf, the checkpointable and name that Orbax uses.
        """
        sources, _ = self._offers(step, save)
        holdings = Holdings.of(list(sources))
        uploading = upload.Upload(
            self._root, self._saved_step(holdings, step, save, names), self._own.host
        )
        num_bytes = backup.back_up(
            holdings,
            self._hosts,
            uploading,
            verified_read.VerifiedReader(sources),
            host=self._own.host,
        )
        return {"bytes": num_bytes}

    def commit_backup(
        self,
        step: int,
        save: str,
        names: Mapping[str, Sequence[str]],
        orbax_files: Mapping[str, str],
    ) -> None:
        """Makes a checkpoint of what all hosts have uploaded; one host does it.

        Args:
          step: the training step.
          save: which save of it.
          names: as for `back_up`.
          orbax_files: what Orbax adds to the values, by path.
        """
        sources, _ = self._offers(step, save)
        holdings = Holdings.of(list(sources))
        commit.commit(
            self._root,
            self._saved_step(holdings, step, save, names),
            hosts=[host.id for host in self._hosts],
            orbax_files={path: text.encode() for path, text in orbax_files.items()},
        )

    # A restore.

    def find(self, step: int | None, without: Sequence[Sequence[Any]]) -> Answer:
        """The newest complete step, or a certain one, but for some saves.

        Returns:
          What is `found`, a step and save, or None; and what was `passed_over`, pairs
          of a step and why.

        Raises:
          CheckpointError: if a certain step is not complete.
        """
        excluded = {(number, save) for number, save in without}
        foreign = [] if self._persistent is None else self._persistent.foreign_steps()
        if step is not None:
            if step in foreign:
                return {"found": {"step": step, "save": ""}, "passed_over": []}
            found = find.of_step(self._tiers(), step, without=excluded)
            return {"found": _place(found), "passed_over": []}
        outcome = find.newest(self._tiers(), without=excluded)
        place = None if outcome.found is None else _place(outcome.found)
        if foreign and (place is None or foreign[-1] > place["step"]):
            place = {"step": foreign[-1], "save": ""}
        passed_over = [list(each) for each in outcome.passed_over.items()]
        return {"found": place, "passed_over": passed_over}

    def complete_steps(self) -> list[Answer]:
        """The steps that are complete, ascending."""
        steps = sorted({step for tier in self._tiers() for step in tier.steps()})
        found = [find.of_step_or_none(self._tiers(), step) for step in steps]
        return [_place(each) for each in found if each is not None]

    def open_step(self, step: int, save: str) -> None:
        """Turns to a step that is to be read.

        Raises:
          CheckpointError: if it is not complete by what this host can reach.
        """
        found = find.of_save(self._tiers(), step, save)
        reader = verified_read.VerifiedReader(found.sources)
        self._restoring = _Restoring(found=found, reader=reader)

    def check(self, of_trees: Mapping[str, Any], components: Sequence[str]) -> None:
        """Raises a CheckpointError unless the step has what is wanted of it."""
        restoring = self._opened()
        held = restoring.found.step
        contents = held.holdings.contents
        missing = sorted(set(components) - contents.components.keys())
        if missing:
            raise errors.CheckpointError(
                f"step {held.step} has no parts {missing}; it has"
                f" {sorted(contents.components)}: restore what it has"
            )
        restoring.wanted = trees.wanted(of_trees)
        trees.check(restoring.wanted, contents, step=held.step)

    def read(self) -> Answer:
        """Reads and verifies what this host's devices need of the step.

        Returns:
          `read_bytes`, by how near their holders were.

        Raises:
          CheckpointError: if no good copy of a part is left.
        """
        restoring = self._opened()
        restoring.values = recovery.read_leaves(
            restoring.found,
            restoring.wanted,
            restoring.reader,
            host=self._own.host,
            domain=self._peers.domain,
        )
        return {
            "read_bytes": recovery.by_nearness(
                restoring.reader.read_bytes,
                self._own.host,
                domain=self._peers.domain,
            )
        }

    def materialise(self, component: str) -> str:
        """Writes the files of a component of the step, verified; the directory."""
        restoring = self._opened()
        files = read_plan.files(
            restoring.found.step,
            self._own.host,
            component,
            domain=self._peers.domain,
        )
        directory = str(self._restored_files / component)
        for file, offers in files:
            _, _, name = file.path.partition("/")
            storage.write_atomic(
                f"{directory}/{name}", restoring.reader.file(file, offers)
            )
        return directory

    def arrays(self, of_trees: Mapping[str, Any]) -> dict[str, Any]:
        """The trees, made of what was read."""
        restoring = self._opened()
        made = {
            leaf.path: leaf.make(restoring.values[leaf.path])
            for leaf in restoring.wanted
        }
        return {
            name: trees.rebuilt(tree, name, made) for name, tree in of_trees.items()
        }

    def bad_copies(self) -> list[Answer]:
        """The bad copies that this host met while it read."""
        return [recovery.describe(bad) for bad in self._opened().reader.bad]

    def repair(self, bad: Sequence[Answer]) -> list[str]:
        """Puts right what is bad of the step that was read, on this host.

        Args:
          bad: copies that any host met.

        Returns:
          The names of what was put right.
        """
        restoring = self._opened()
        files = {
            each["file"]
            for each in bad
            if each["tier"] == "local" and each["host"] == self._own.host.id
        }
        if not files:
            return []
        return recovery.put_right(restoring.found, restoring.reader, self._own, files)

    def forget_read(self) -> None:
        """Lets go of what was read."""
        self._restoring = None
        storage.remove(self._restored_files)

    def close(self) -> None:
        """Lets go of the slot, and of the agent if this process started it."""
        self._closing.close()

    def _opened(self) -> _Restoring:
        assert self._restoring is not None
        return self._restoring

    def _service(self) -> agent.Service:
        tls = self._peers.tls
        return agent.Service(
            root=str(self._disk.root),
            interface=self._peers.interface,
            port=self._peers.port,
            tls_certificate=None if tls is None else tls.certificate,
            tls_key=None if tls is None else tls.key,
        )

    def _tiers(self) -> list[Tier]:
        return [
            *self._ram_tiers,
            *([] if self._persistent is None else [self._persistent]),
        ]

    def _offers(self, step: int, save: str) -> tuple[dict[Offer, Source], list[str]]:
        # What is in RAM of one save.
        sources: dict[Offer, Source] = {}
        problems: list[str] = []
        for tier in self._ram_tiers:
            offered = tier.offers(step)
            problems += offered.problems
            sources.update(
                {
                    offer: of
                    for offer, of in offered.sources.items()
                    if offer.manifest.save == save
                }
            )
        return sources, problems

    def _take(
        self,
        holdings: Holdings,
        items: Sequence[tuple[int, Host]],
        sources: Mapping[Offer, Source],
    ) -> replication.Taken:
        manifest = holdings.offers[0].manifest
        size = int(sum(holdings.stored_bytes[item] for item, _ in items))
        writer = self._own.copy_writer(
            manifest.step, manifest.save, manifest.contents, num_bytes=size
        )

        def keep(copy: replication.ChunkCopy | replication.FileCopy) -> None:
            if isinstance(copy, replication.FileCopy):
                writer.put_file(copy.file, copy.content)
            else:
                writer.put(copy.fragment, copy.values)

        reader = verified_read.VerifiedReader(sources)
        taken = replication.take(holdings, items, reader, keep)
        writer.commit()
        return taken

    def _saved_step(
        self,
        holdings: Holdings,
        step: int,
        save: str,
        names: Mapping[str, Sequence[str]],
    ) -> upload.SavedStep:
        chunks = _chunk_shapes(holdings)
        return upload.SavedStep(
            run=self._run,
            step=step,
            save=save,
            contents=holdings.contents,
            arrays={
                path: ocdbt.StoredArray(
                    checkpointable=checkpointable, name=name, chunk=tuple(chunks[path])
                )
                for path, (checkpointable, name) in names.items()
            },
        )

    def _newest_save(self) -> int:
        saves = [
            save
            for slot in self._disk.slots()
            for _, save in self._disk.saves(slot)
            if save.isdecimal()
        ]
        return max(map(int, saves), default=0)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Saving:
    captured: capture.Captured
    writer: step_writer.StepWriter | None = None
    problem: str | None = None
    written: Sequence[step_writer.WrittenFile] = ()


@dataclasses.dataclass(kw_only=True, eq=False)
class _Restoring:
    found: find.FoundStep
    reader: verified_read.VerifiedReader
    wanted: Sequence[trees.WantedLeaf] = ()
    values: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)


def _place(found: find.FoundStep) -> Answer:
    return {"step": found.step.step, "save": found.step.save}


def _chunk_shapes(holdings: Holdings) -> dict[str, list[int]]:
    # All chunks of a leaf are of one shape; a leaf without elements has none.
    shapes = {}
    for number, leaf in enumerate(holdings.contents.leaves):
        held = holdings.of_leaf(number)
        shapes[leaf.path] = [max(1, size) for size in leaf.shape]
        if len(held):
            shapes[leaf.path] = list(
                holdings.boxes[int(held[0])].shape[: len(leaf.shape)]
            )
    return shapes


def _diverged(holdings: Holdings, item: int) -> str:
    hosts = ", ".join(offer.host.id for offer in holdings.holders(item))
    return f"{holdings.name(item)} at hosts {hosts}"
