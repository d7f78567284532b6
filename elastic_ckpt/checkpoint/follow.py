"""Follows a live run: its steps as they become complete, in storage or in its RAM.

A program that evaluates, exports or serves steps needs no part in the run and no
devices of it:

    for step in ec.watch_steps("gs://bucket/run/checkpoints"):
        loss = evaluate(step.load({"params": abstract_params}))
        ec.record_metrics(step, {"eval_loss": loss})

The metrics count for the run's retention as if the run had evaluated the step itself.

With the secret of the run, steps are followed in the RAM of its hosts, which save far
more often than storage does. The run records its agents in storage (`run_files`); one
of them at a time is asked for its list of steps, and only when that names a new save
are all asked, and the manifests searched as in a restore (`tiers.find`). RAM is for the
newest steps, so the newest is always taken. It may be gone before it is read: the
leaves that were loaded from the step before are read before a step is yielded, and if
that fails, so is the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from elastic_ckpt.checkpoint import foreign_steps, structure
from elastic_ckpt.checkpoint.host import trees, verified_read
from elastic_ckpt.core import boxes, bucket_clients, errors, storage
from elastic_ckpt.steps import owners, read_plan
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import peer, peer_client, secret
from elastic_ckpt.tiers.persistent import claims, leases, persistent_root, run_files
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.persistent_tier import PersistentTier
from elastic_ckpt.tiers.ram import machine

_POLL_SECS = 10.0
# Between two lists of steps from agents; each is one small request.
_RAM_POLL_SECS = 0.2
# Between two warnings that there is no directory.
_WARN_SECS = 600
# Agents that are asked for their list before all are, at the same time.
_MOST_ASKED = 3
# The keys under which a state has its weights.
_WEIGHTS = ("params", "model")


class Step:
    """A complete step of a run that is followed; `ec.watch_steps` yields it.

    Attributes:
      step: the number of the training step.
      save: which save of it, as a run that goes back saves steps again; empty if Orbax
        alone saved it.
    """

    def __init__(
        self,
        step_id: StepId,
        *,
        _run: str,
        _follower: _Follower,
        _in_ram: find.FoundStep | None = None,
    ) -> None:
        self.step, self.save = step_id
        self._run, self._follower, self._in_ram = _run, _follower, _in_ram

    def __repr__(self) -> str:
        where = self._follower.root.final(self.step)
        return f"Step({self.step}, in {'RAM' if self._in_ram else where})"

    @property
    def path(self) -> epath.Path:
        """Its directory in persistent storage.

        Raises:
          CheckpointError: if the step was found in the RAM of the run, and so has none.
        """
        if self._in_ram is not None:
            raise errors.CheckpointError(
                f"step {self.step} is in the RAM of its run and has no directory; load"
                " it with step.load(tree), or call ec.watch_steps without secret_file"
                " to follow the steps in storage"
            )
        return self._follower.root.final(self.step)

    def load(self, tree: Any = None, *, checkpointable_name: str = "state") -> Any:
        """Loads leaves of the step, each compared with the digest that it was saved by.

        Leaves that have not changed since the step before are not read again.

        Args:
          tree: the leaves that are wanted, in the structure in which they were saved,
            such as `{"params": abstract_params}`; others are left out. A leaf is an
            array or `jax.ShapeDtypeStruct`, which is placed by its sharding, or an
            object with only shape and dtype, which becomes an array of NumPy that
            cannot be written to. None takes the weights, which are what the state has
            as `params` or `model`, or all of it if it has neither.
          checkpointable_name: of the tree in the step.

        Returns:
          The tree with its values.

        Raises:
          OtherModelError: if the step lacks a leaf, or has it in another shape.
          StepGoneError: if the step is no longer there; the next one may be.
          CheckpointError: if the step has no tree of that name, or cannot be found.
        """
        if not self.save:
            parts = {checkpointable_name: tree}
            loaded = foreign_steps.load(self.path, parts, partial=True)
            return loaded[checkpointable_name]
        found = self._in_ram
        if found is None:
            tier = PersistentTier(self._follower.root, run=self._run)
            found = find.of_save([tier], StepId(self.step, self.save))
        return self._follower.load(found, tree, checkpointable_name)


def watch_steps(
    directory: epath.PathLike,
    *,
    after: int = -1,
    poll_secs: float = _POLL_SECS,
    timeout_secs: float | None = None,
    duration_secs: float = leases.DURATION_SECS,
    secret_file: epath.PathLike | None = None,
    tls_authority: epath.PathLike | None = None,
    max_bytes_per_sec: float | None = None,
) -> Iterator[Step]:
    """Waits for the steps of a run, and yields each as it becomes complete.

    Each step in storage is kept by a lease (`ec.lease`) until the next one is
    requested. Steps that the run removes before their turn are passed over. A step that
    the run saves again, after it went back to an earlier one, is yielded again.

    With the run's secret, steps are followed in the RAM of its hosts as well: the one
    that is yielded is then always the newest complete one, and those between are passed
    over. What `Step.load` was asked for of the step before is read before a step is
    yielded; a step that is removed meanwhile is passed over. The run needs `ec.Peers`,
    and its agents have to be reachable from here.

    Args:
      directory: where the run keeps its steps in storage; it need not exist yet. Of a
        run without storage, the directory of `ec.Local` on a machine of the run.
      after: only later steps are yielded; by default all that are there.
      poll_secs: the time between two looks at the storage. An agent of the run is asked
        more often; storage then only if no step came for so long.
      timeout_secs: ends the iteration when there was no new step for so long; None
        never ends it.
      duration_secs: the duration of the leases, as for `ec.lease`.
      secret_file: a file with the secret of the run: that of its `ec.Peers`, or
        `secret` in the directory of `ec.Local` on any of its machines. None follows the
        steps in storage alone; if `directory` is that of `ec.Local`, it takes the
        secret there.
      tls_authority: a PEM file with the authority that signs the agents' certificates;
        with it, agents that do not encrypt are refused.
      max_bytes_per_sec: the most bytes a second that are read from agents, where the
        run needs the network itself; None sets no limit.

    Yields:
      In storage, the steps in ascending order; in RAM, the newest.

    Raises:
      CheckpointError: if the lease of a step was lost while it was read.
      RunError: if there is no secret in the file, or no agent takes it.
      ConfigError: if `tls_authority` cannot be read.
    """
    root, look_secs = PersistentRoot.from_path(directory), poll_secs
    if secret_file is None and _is_ram_disk(root):
        secret_file = secret.path(root.path)
    client = None
    if secret_file is not None:
        look_secs = min(poll_secs, _RAM_POLL_SECS)
        # A program may change its directory before it asks for the first step.
        file = secret_file = storage.absolute(secret_file)
        secret.read(file)
        client = peer_client.PeerClient(
            lambda: secret.current(file) or "",
            tls_ca=tls_authority,
            max_bytes_per_sec=max_bytes_per_sec,
        )
    follower = _Follower(root, client, secret_file, after=after, poll_secs=poll_secs)
    return _followed(
        follower,
        look_secs=look_secs,
        timeout_secs=math.inf if timeout_secs is None else timeout_secs,
        duration_secs=duration_secs,
    )


def _followed(
    follower: _Follower, *, look_secs: float, timeout_secs: float, duration_secs: float
) -> Iterator[Step]:
    found_secs = time.monotonic()
    while True:
        before, step = follower.last, follower.next()
        if step is not None:
            keep: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if step._in_ram is None:
                keep = leases.lease(step.path, duration_secs=duration_secs)
            try:
                with keep:
                    yield step
                found_secs = time.monotonic()
                continue
            except leases.StepGoneError as error:
                # The newest comes again: only an older save of it may be removed.
                logging.info("%s", error)
                follower.last = before
        if time.monotonic() - found_secs >= timeout_secs:
            return
        time.sleep(min(look_secs, timeout_secs))


def record_metrics(step: Step | epath.PathLike, metrics: Mapping[str, Any]) -> None:
    """Records metrics of a saved step, so that its run ranks it by them (`ec.BestN`).

    Any program may call it, during the run or later. The run counts the metrics from
    its next save on. They belong to this save of the step: if the run goes back and
    saves the step again, they do not count for that. Those of a step that was only in
    RAM count for the newest step before it in storage.

    Args:
      step: from `ec.watch_steps`, or the directory of a step in persistent storage.
      metrics: numbers by name; they replace those that were recorded for it before.

    Raises:
      CheckpointError: if this is not a step that a run of this library has saved, or
        the metrics are not JSON.
      OSError: if storage is unavailable; for a bucket, it may be its client's error.
    """
    if isinstance(step, Step):
        root, number = step._follower.root, step.step
        run, save = step._run, step.save
    else:
        path = storage.absolute(step)
        root = PersistentRoot.from_path(path.parent)
        number = int(path.name) if path.name.isdecimal() else -1
        run, save = persistent_root.committed(root.final(number))
    if _is_ram_disk(root):
        raise errors.CheckpointError(
            f"metrics of step {number} are not recorded: they belong in persistent"
            " storage; give ec.watch_steps the directory of the run's ec.Persistent"
        )
    if not run:
        raise errors.CheckpointError(
            f"{step} is not a step that a run of this library has committed; name"
            " PERSISTENT_DIRECTORY/<step>"
        )
    run_files.record_evaluation(
        root,
        run_files.Evaluation(
            run=run,
            step=number,
            save=save,
            metrics=structure.json_of_user("metrics", metrics),
        ),
    )


class _Follower:
    """Finds the next step of a run, in storage or in the RAM of its hosts, and loads.

    It keeps the leaves that one step has as the step before.

    Args:
      root: of the steps in storage, where the run records its agents.
      client: of the agents; None to follow the steps in storage alone.
      secret_file: with the run's secret, for messages.
      after: only later steps count.
      poll_secs: between two looks at storage while there is no new step in RAM.

    Attributes:
      root: as given.
      last: the step that came last.
    """

    def __init__(
        self,
        root: PersistentRoot,
        client: peer_client.PeerClient | None,
        secret_file: epath.PathLike | None,
        *,
        after: int,
        poll_secs: float,
    ) -> None:
        self.root, self._client, self._secret_file = root, client, secret_file
        self._after, self._poll_secs = after, poll_secs
        if client is not None:
            # A step may be loaded after the last one was requested.
            weakref.finalize(self, client.close)
        domains = owners.domains_of_environment()
        self._host = Host(id="follower", number=-1, domains=domains)
        # The trees that were loaded of the present step, with their names.
        self._asked: list[tuple[Any, str]] = []
        # By the path of a leaf, the saved boxes with their digests, and values of it.
        self._kept: dict[str, tuple[Any, dict[boxes.Box, np.ndarray]]] = {}
        # Of the run, as far as it is known.
        self.last, self._line = StepId(-1, ""), Line(save="", parents=())
        # The steps in storage that were looked at.
        self._seen: set[int] = set()
        self._unreadable: dict[StepId, str] = {}
        # When there was a new step in RAM, or the last look at storage.
        self._looked_secs = -math.inf
        self._agents = run_files.RunAgents("", {})
        # The later saves that were searched last, and when to search them again.
        self._searched: set[StepId] | None = set()
        self._pause_secs = self._again_secs = 0.0

    def next(self) -> Step | None:
        """The next step, found in RAM, or committed in storage; None if there is none.

        In RAM it is the newest, and in storage too if RAM is followed.

        Raises:
          RunError: if no agent takes the secret.
        """
        if self._client is None:
            self._read_line()
            return self._in_storage()
        is_due = time.monotonic() - self._looked_secs >= self._poll_secs
        if is_due:
            self._read_line()
            self._read_record()
        step = self._in_ram() or (self._in_storage() if is_due else None)
        if step is not None or is_due:
            self._looked_secs = time.monotonic()
        return step

    def load(self, found: find.FoundStep, tree: Any, name: str) -> Any:
        """As `Step.load`; a step that was in RAM is gone if it cannot be read.

        Raises:
          StepGoneError: if no good copy of a part is left.
        """
        asked = _resolved(tree, name, found)
        self._asked.append((tree, name))
        wanted = trees.wanted(asked.read)
        try:
            self._read(found, wanted)
        except errors.CheckpointError as error:
            raise leases.StepGoneError(
                f"step {found.step_id.step} cannot be read any more ({error}); load the"
                " next one. If the run removes steps faster than they are read here,"
                " have it keep more of them: ec.Local(..., keep=LatestN(3))"
            ) from error
        made = {
            leaf.path: leaf.make([self._kept[leaf.path][1][box] for box in leaf.boxes])
            for leaf in wanted
        }
        return asked.filled({name: trees.rebuilt(asked.read[name], name, made)})[name]

    def _read(self, found: find.FoundStep, wanted: Sequence[trees.WantedLeaf]) -> None:
        # Reads the boxes that are not kept, or are of a leaf that has changed.
        table, lacking = found.table, []
        numbers = {leaf.path: n for n, leaf in enumerate(table.contents.leaves)}
        for leaf in wanted:
            number = numbers[leaf.path]
            parts = table.items.take(table.of_leaf(number))
            same = (parts.start, parts.stop, parts.digest)
            saved = table.contents.leaves[number], *(each.tobytes() for each in same)
            if leaf.path not in self._kept or self._kept[leaf.path][0] != saved:
                self._kept[leaf.path] = (saved, {})
            kept = self._kept[leaf.path][1]
            new = tuple(box for box in leaf.boxes if box not in kept)
            keep = functools.partial(_keep, kept, new)
            lacking.append(
                dataclasses.replace(leaf, boxes=new, place=keep, is_moved=False)
            )
        near = read_plan.Nearness(table, self._host)
        verified_read.read_leaves(verified_read.VerifiedReader(found, near), lacking)

    def _is_later(self, step_id: StepId) -> bool:
        # A run that went back saves earlier steps under later saves.
        is_new = step_id.step > self.last.step or step_id.save > self.last.save
        is_good = step_id.step > self._after and step_id not in self._unreadable
        return is_new and is_good and not self._line.abandons(step_id)

    def _in_storage(self) -> Step | None:
        # The first later step, or the newest if RAM is followed; its save is empty if
        # Orbax alone saved it.
        root = self.root
        try:
            steps = root.steps()
            if not (steps or root.path.exists()):
                logging.log_every_n_seconds(
                    logging.WARNING,
                    "watch_steps: there is no directory %s yet; unless a run is about"
                    " to create it, give the directory of its ec.Persistent",
                    _WARN_SECS,
                    root.path,
                )
            # A step that is gone may come back as another save.
            self._seen.intersection_update(steps)
            for step in steps if self._client is None else steps[-1:]:
                # Only the newest step is overwritten in its place.
                if step <= self._after or (step in self._seen and step != steps[-1]):
                    continue
                run, save = persistent_root.committed(root.final(step))
                later = StepId(step, save or root.foreign_save(step))
                # One that is being removed is passed over, though it is still listed.
                self._seen.add(step)
                if self._is_later(later):
                    self.last, self._asked = later, []
                    return Step(StepId(step, save), _run=run, _follower=self)
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            logging.warning(
                "the steps in %s cannot be followed now: %s", root.path, error
            )
        return None

    def _read_line(self) -> None:
        # An abandoned step stays in storage while it is leased.
        try:
            newest = claims.newest(self.root.path)
        except errors.CheckpointError as error:
            logging.warning("the run may have gone back: %s", error)
            return
        lines = [self._line, *([newest.line] if newest else [])]
        self._line = max(lines, key=lambda line: line.save)

    def _read_record(self) -> None:
        root = self.root
        try:
            agents = run_files.read_agents(root.path)
            self._agents = agents or self._agents
            if agents is None and self._looked_secs == -math.inf:
                logging.warning(
                    "watch_steps: %s names no agents, so steps are followed in storage"
                    " alone; a run with ec.Local and ec.Peers records them when it"
                    " begins",
                    root.path / run_files.AGENTS,
                )
        except errors.CheckpointError as error:
            logging.warning("the agents of the run may have moved: %s", error)

    def _in_ram(self) -> Step | None:
        # The list of one agent decides whether to search: each has parts of every step.
        urls = list(self._agents.urls.values())
        some = map(self._peer, random.sample(urls, min(_MOST_ASKED, len(urls))))
        asked = next((each for each in some if not each.listing.problem), None)
        # None: the agents that were asked do not answer.
        later = {*filter(self._is_later, asked.known_saves())} if asked else None
        now_secs, is_again = time.monotonic(), later == self._searched
        if later == set() or (is_again and now_secs < self._again_secs):
            return None
        # Less and less often for saves that stay incomplete.
        more_secs = min(2 * self._pause_secs, self._poll_secs)
        self._pause_secs = more_secs if is_again else _RAM_POLL_SECS
        self._searched, self._again_secs = later, now_secs + self._pause_secs
        peers = list(map(self._peer, urls))
        search = find.search(peers, lines=[self._line], without=self._unreadable)
        self._line, found = search.line, search.newest().found
        refusing = [each.url for each in peers if each.listing.is_refused]
        if refusing and not any(each.listing.manifests for each in peers):
            raise errors.RunError(
                f"{', '.join(refusing)}: no agent of the run takes the secret in"
                f" {self._secret_file}; give a copy of the file `secret` in the"
                " directory of ec.Local on any machine of the run, or the secret_file"
                " of its ec.Peers"
            )
        if found is None or not self._is_later(found.step_id):
            return None
        return self._begun(found)

    def _begun(self, found: find.FoundStep) -> Step | None:
        # A step in RAM, of which what was loaded from the one before is read already.
        asked, self._asked = self._asked, []
        wanted = []
        for tree, name in asked:
            # What does not fit this step is an error of its load.
            with contextlib.suppress(errors.ElasticCkptError):
                wanted.append(trees.wanted(_resolved(tree, name, found).read))
        try:
            for of_tree in wanted:
                self._read(found, of_tree)
        except errors.CheckpointError as error:
            logging.info("step %d is passed over: %s", found.step_id.step, error)
            self._unreadable[found.step_id] = str(error)
            return None
        self.last, self._unreadable = found.step_id, {}
        return Step(found.step_id, _run=found.table.run, _follower=self, _in_ram=found)

    def _peer(self, url: str) -> peer.Peer:
        assert self._client is not None
        return peer.Peer(url, self._client, self._agents.run)


def _resolved(tree: Any, name: str, found: find.FoundStep) -> structure.AskedTrees:
    # What is asked of a step; other leaves of it are left out.
    contents, step = found.table.contents, found.step_id.step
    if tree is None:
        whole = structure.saved_trees(contents).get(name, {})
        weights = [k for k in _WEIGHTS if isinstance(whole, Mapping) and k in whole]
        tree = {key: whole[key] for key in weights[:1]} or None
    asked = structure.resolve(
        {name: tree}, contents, step=step, partial=True, may_add=False
    )
    for path, leaf in trees.leaves(asked.read).items():
        sharding = getattr(leaf, "sharding", None)
        if not getattr(sharding, "is_fully_addressable", True):
            raise errors.ConfigError(
                f"{path} is wanted on devices of several processes, which may be at"
                " different steps; follow in one process, give its leaves shardings"
                " over jax.local_devices(), and broadcast them"
            )
    return asked


def _keep(
    kept: dict[boxes.Box, np.ndarray],
    new: Sequence[boxes.Box],
    number: int,
    values: np.ndarray,
) -> None:
    # They are handed out, and are those of the next load, too.
    values.flags.writeable = False
    kept[new[number]] = values


def _is_ram_disk(root: PersistentRoot) -> bool:
    return not root.in_place and machine.find(root.path) is not None
