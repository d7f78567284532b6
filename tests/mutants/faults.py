"""Mistakes written by hand, each of which would cost a user something."""

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Fault:
    """One mistake in one module.

    Attributes:
      name: What goes wrong.
      path: The module's, from the project's root.
      code: What stands there, once.
      mistake: What stands there with the mistake.
      tests: Files or directories of default tests of which one has to fail.
    """

    name: str
    path: str
    code: str
    mistake: str
    tests: tuple[str, ...]

    def applied(self) -> str:
        """The module's source with the mistake in it."""
        source = pathlib.Path(self.path).read_text()
        if source.count(self.code) != 1:
            raise ValueError(f"{self.path} has {self.code!r} not exactly once")
        return source.replace(self.code, self.mistake)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "a value is returned that differs from its digest",
        "elastic_ckpt/checkpoint/host/verified_read.py",
        "if actual.digest() == expected:",
        "if actual.digest():",
        ("tests/checkpoint/host/test_verified_read.py",),
    ),
    Fault(
        "a restore begins to read all boxes at once",
        "elastic_ckpt/checkpoint/host/verified_read.py",
        "self._stop > self.ahead[0].start + _RING_BYTES:",
        "self._stop > self.ahead[0].start + 16 * _RING_BYTES:",
        ("tests/checkpoint/host/test_verified_read.py",),
    ),
    Fault(
        "a large leaf comes to a controller's hosts whole",
        "sidecar/elastic_ckpt_sidecar/arrays.py",
        "self._most_bytes if cut and can_join else math.inf",
        "math.inf",
        ("tests/checkpoint/host/test_verified_read.py",),
    ),
    Fault(
        "a lack of descriptors is taken for a bad copy",
        "elastic_ckpt/core/errors.py",
        "if os.strerror(errno.EMFILE) in str(error):",
        "if os.strerror(errno.ENOSPC) in str(error):",
        ("tests/checkpoint/test_limited_memory.py",),
    ),
    Fault(
        "a mapped file keeps a descriptor",
        "elastic_ckpt/core/host_memory.py",
        "protection, flags, descriptor, 0)",
        "protection, flags, os.dup(descriptor), 0)",
        ("tests/checkpoint/test_limited_memory.py",),
    ),
    Fault(
        "a box is read up to the element before its last",
        "elastic_ckpt/steps/read_plan.py",
        "stop=np.minimum(wanted.boxes.stop[of_wanted], table.boxes.stop[item]),",
        "stop=np.minimum(wanted.boxes.stop[of_wanted], table.boxes.stop[item] - 1),",
        ("tests/steps/test_read_plan.py",),
    ),
    Fault(
        "boxes overlap that touch",
        "elastic_ckpt/core/boxes.py",
        "if any(first >= last for first, last in zip(start, stop, strict=True)):",
        "if any(first > last for first, last in zip(start, stop, strict=True)):",
        ("tests/core/test_boxes.py",),
    ),
    Fault(
        "retention removes a pinned step",
        "elastic_ckpt/steps/retention.py",
        "kept = set(in_flight) | set(preserved)",
        "kept = set(in_flight)",
        ("tests/steps/test_retention.py",),
    ),
    Fault(
        "retention removes a step that is being read",
        "elastic_ckpt/steps/retention.py",
        "kept = set(in_flight) | set(preserved)",
        "kept = set(preserved)",
        ("tests/steps/test_retention.py",),
    ),
    Fault(
        "a step counts although its holders disagree",
        "elastic_ckpt/steps/table.py",
        "return not (self.gaps or len(self.diverged))",
        "return not self.gaps",
        ("tests/steps/test_search.py",),
    ),
    Fault(
        "a step counts that lacks a part",
        "elastic_ckpt/steps/table.py",
        "return not (self.gaps or len(self.diverged))",
        "return not len(self.diverged)",
        ("tests/steps/test_search.py",),
    ),
    Fault(
        "a host uploads the share of another one",
        "elastic_ckpt/steps/owners.py",
        "return min(int(middle / max(1, total) * num_holders), num_holders - 1)",
        "return min(int(middle / max(1, total) * num_holders) + 1, num_holders - 1)",
        ("tests/steps/test_owners.py",),
    ),
    Fault(
        "a step is read that the run has gone back from",
        "elastic_ckpt/steps/step.py",
        "return step_id.step > newest[step_id.save]",
        "return step_id.step > newest[step_id.save] + 1",
        ("tests/checkpoint/test_lines.py",),
    ),
    Fault(
        "a manifest is read as that of another run or host",
        "elastic_ckpt/steps/manifest.py",
        "if actual == (run, step, os.path.basename(path)):",
        "if saved.step_id.step == step:",
        ("tests/steps/test_manifest.py",),
    ),
    Fault(
        "two programs write to one directory",
        "elastic_ckpt/tiers/persistent/claims.py",
        "            if not may_follow and before.process != own.process:",
        "            if may_follow is None:",
        ("tests/checkpoint/test_one_writer.py",),
    ),
    Fault(
        "two starts claim one world",
        "elastic_ckpt/tiers/persistent/records.py",
        "        if not (is_created or read(path) == record):",
        "        if not (is_created or read(path)):",
        ("tests/model/test_leader_claims.py",),
    ),
    Fault(
        "a start does not notice that it was replaced",
        "elastic_ckpt/tiers/persistent/claims.py",
        "    if storage.has_file(there.path(number + 1)):",
        "    if storage.has_file(there.path(number + 2)):",
        ("tests/tiers/test_records.py",),
    ),
    Fault(
        "hosts save as parts of different runs",
        "elastic_ckpt/checkpoint/host/endpoint.py",
        "directory's name)\": self._config.run,",
        'directory\'s name)": "",',
        ("tests/checkpoint/test_hosts.py",),
    ),
    Fault(
        "a run goes on without the files that identify it",
        "elastic_ckpt/tiers/ram/ram_disk.py",
        "            if not os.path.exists(each):",
        "            if not os.path.exists(self.root):",
        ("tests/checkpoint/test_one_writer.py",),
    ),
    Fault(
        "two processes hold one lock",
        "elastic_ckpt/core/storage.py",
        "_lock(file, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK)",
        "_lock(file, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)",
        ("tests/tiers/test_local.py",),
    ),
    Fault(
        "a manifest lacks the files of components",
        "elastic_ckpt/checkpoint/host/saver.py",
        "            writer.parts |= parts\n",
        "",
        ("tests/checkpoint/test_component_io.py",),
    ),
    Fault(
        "the files of a step go before its manifest",
        "elastic_ckpt/tiers/ram/local.py",
        "            storage.remove(self.disk.manifest_path(slot, step_id))\n"
        "            self.files.recycle(os.fspath(directory))\n",
        "            self.files.recycle(os.fspath(directory))\n",
        ("tests/tiers/test_local.py",),
    ),
    Fault(
        "an agent follows a link out of its directory",
        "elastic_ckpt/tiers/peers/agent_server.py",
        "if is_hidden or len(names) < 3 or os.path.realpath(path) != path:",
        "if is_hidden or len(names) < 3:",
        ("tests/tiers/test_agent.py",),
    ),
    Fault(
        "an agent answers to any token",
        "elastic_ckpt/tiers/peers/agent_server.py",
        'if not known or not hmac.compare_digest(given, f"Bearer {known}".encode()):',
        'if not known or not given.startswith(b"Bearer "):',
        ("tests/tiers/test_agent.py",),
    ),
    Fault(
        "a component's state is loaded unchecked",
        "elastic_ckpt/checkpoint/components/encoding.py",
        "if value != file.read(_DIGEST_LENGTH + 1):",
        "if not file.read(_DIGEST_LENGTH):",
        ("tests/own_formats",),
    ),
    Fault(
        "a host loads the state of another one",
        "elastic_ckpt/checkpoint/components/component.py",
        "return read(states.index(now.name))",
        "return read(0)",
        ("tests/checkpoint/components/test_component.py",),
    ),
    Fault(
        "a shard's restart point is as new as its end at the same row",
        "elastic_ckpt/data/cursors.py",
        "ENDED in (one or ())",
        "False",
        ("tests/data/test_local_batches.py",),
    ),
    Fault(
        "datasets are drawn in the order of a state's keys",
        "elastic_ckpt/data/mixing.py",
        "= dict(sorted(weights.items())), ended",
        "= weights, ended",
        ("tests/data/test_local_batches.py",),
    ),
    Fault(
        "a cursor file of another step is loaded",
        "elastic_ckpt/data/cursors.py",
        "if key != CURSORS and fields.setdefault(key, value) != value:",
        "if key != CURSORS and fields.setdefault(key, value) is None:",
        ("tests/data/test_state.py",),
    ),
    Fault(
        "a resumed shard has yielded one row less",
        "elastic_ckpt/data/rows.py",
        "(batches * rows + shards - 1 - shard % shards) // shards",
        "(batches * rows + shards - 2 - shard % shards) // shards",
        ("tests/data/test_rows.py",),
    ),
    Fault(
        "two hosts write the cursor of one shard",
        "elastic_ckpt/data/iterator.py",
        "if saves[s] == me",
        "if saves[s] <= me",
        ("tests/data/test_iterator.py",),
    ),
    Fault(
        "a share begins a record late",
        "elastic_ckpt/data/order.py",
        "first = begin * least + num_more(begin)",
        "first = begin * least + num_more(begin) + 1",
        ("tests/data/test_records.py",),
    ),
    Fault(
        "a document comes twice after a resume",
        "elastic_ckpt/data/lm/rows.py",
        '            self._next = state["row"]',
        '            self._next = max(0, state["row"] - 1)',
        ("tests/data/test_exactness.py",),
    ),
    Fault(
        "a cursor is one row late",
        "elastic_ckpt/data/lm/rows.py",
        '        return {**self._begin, "row": self._next}',
        '        return {**self._begin, "row": self._next + 1}',
        ("tests/data/test_exactness.py",),
    ),
    Fault(
        "whole documents begin a row that stays nearly empty",
        "elastic_ckpt/data/lm/rows.py",
        "                kept -= int(_FREE * length)",
        "                kept = int(ends[-1])",
        ("tests/data/lm/test_rows.py",),
    ),
    Fault(
        "what follows the first member of a gzip file is not looked at",
        "elastic_ckpt/data/sources/lines.py",
        "gzip.GzipFile(fileobj=stream)",
        "io.BytesIO(zlib.decompressobj(31).decompress(stream.read()))",
        ("tests/data/sources/test_content.py",),
    ),
    Fault(
        "a checksum of another program is not compared",
        "elastic_ckpt/universal/reading/sources.py",
        "        if crc != entry.crc:",
        "        if crc < 0:",
        ("tests/universal/reading/test_engine.py",),
    ),
    Fault(
        "a flat range loses a row that begins where it does",
        "elastic_ckpt/universal/factors.py",
        "head = min(-(-start // row) * row, stop)",
        "head = min((start // row + 1) * row, stop)",
        ("tests/universal/reading/test_engine.py",),
    ),
    Fault(
        "a mean is a sum",
        "elastic_ckpt/universal/reading/arithmetic.py",
        "                total = total / len(spec.operands)",
        "                total = total / 1",
        ("tests/universal/reading/test_engine.py",),
    ),
    Fault(
        "the rows of a box are written over each other",
        "elastic_ckpt/universal/writing/safetensors_files.py",
        "yield rows[index], first + sum(map(operator.mul, index, strides))",
        "yield rows[index], first",
        ("tests/universal/writing/test_convert.py",),
    ),
    Fault(
        "tiles of a transposed matrix are shifted",
        "elastic_ckpt/universal/reading/arithmetic.py",
        "            after = column + _COLUMN\n",
        "            after = column + _COLUMN - 1\n",
        ("tests/universal/reading/test_engine.py",),
    ),
    Fault(
        "a move has two dims swapped",
        "elastic_ckpt/universal/reading/engine.py",
        "    one, two, three = map(tuple, of_dims)\n",
        "    one, three, two = map(tuple, of_dims)\n",
        (
            "tests/universal/reading/test_engine.py",
            "tests/universal/rules/test_random_layouts.py",
        ),
    ),
    Fault(
        "an executable that somebody altered is run",
        "elastic_ckpt/elastic/executables.py",
        "if not hmac.compare_digest(mac, self._mac(path, payload)):",
        "if len(mac) != _MAC_BYTES:",
        ("tests/elastic/test_executables.py",),
    ),
    Fault(
        "an executable is loaded for other arguments",
        "elastic_ckpt/elastic/executables.py",
        "code = jitted.__wrapped__, str(structure), shapes, _devices(arguments)",
        "code = jitted.__wrapped__",
        ("tests/elastic/test_executables.py",),
    ),
    Fault(
        "a batch is accumulated in unequal microbatches",
        "elastic_ckpt/elastic/decision.py",
        "if rows_per_device % count == 0 and rows_per_device // count <= most",
        "if rows_per_device // count <= most",
        ("tests/elastic/test_decision.py",),
    ),
    Fault(
        "a run trains on fewer slices than it may",
        "elastic_ckpt/elastic/decision.py",
        "for number in range(most, policy.min_slices - 1, -1):",
        "for number in range(most, policy.min_slices - 2, -1):",
        ("tests/elastic/test_decision.py",),
    ),
    Fault(
        "a run that diverged is started again",
        "elastic_ckpt/elastic/failures.py",
        '    Kind("diverged", "program", STOP,',
        '    Kind("diverged", "program", RESTART,',
        ("tests/elastic/test_failures.py",),
    ),
    Fault(
        "a first compilation is taken for a hang",
        "elastic_ckpt/elastic/watch.py",
        "max(_LEAST_SECS, _PATIENCE * longest_secs)",
        "_PATIENCE * longest_secs",
        ("tests/elastic/test_watch.py",),
    ),
    Fault(
        "state in device memory is that of another step",
        "elastic_ckpt/elastic/world.py",
        "if form != (step, structure, shapes):",
        "if form[1:] != (structure, shapes):",
        ("tests/elastic/test_pathways.py",),
    ),
    Fault(
        "an audit compares no digests",
        "elastic_ckpt/training/audit.py",
        "            if record.digest != wanted:",
        "            if not wanted:",
        ("tests/training/test_audit.py",),
    ),
    Fault(
        "a run goes back to a step that had diverged",
        "elastic_ckpt/training/callbacks.py",
        "if step <= since - 2 - margin)",
        "if step <= since - 1 - margin)",
        ("tests/training/test_divergence.py",),
    ),
    Fault(
        "a step is saved that a callback has found to be bad",
        "elastic_ckpt/training/trainer.py",
        "                if self.callbacks.decision is None:",
        "                if self.callbacks:",
        ("tests/training/test_loop.py",),
    ),
    Fault(
        "a step is saved before its log is durable",
        "elastic_ckpt/training/own_loop.py",
        "            self._sync()",
        "            pass",
        ("tests/training/test_own_loop.py",),
    ),
    Fault(
        "rows that no step used are not counted",
        "elastic_ckpt/training/audit.py",
        "                num_lost += len(ids) - noted",
        "                num_lost += 0",
        ("tests/training/test_audit.py",),
    ),
    Fault(
        "`verify` passes a wrong value",
        "elastic_ckpt/inspect/verification.py",
        "            why = stored_part.damage(memory, leaf, named)",
        "            why = None",
        ("tests/cli/test_verify.py",),
    ),
    Fault(
        "MaxText's data starts anew at each resume",
        "elastic_ckpt/integrations/maxtext.py",
        "wanted = {**abstract_checkpointables, ITERATOR: self._run.batches}",
        "wanted = {**abstract_checkpointables}",
        ("tests/integrations/test_maxtext.py",),
    ),
    Fault(
        "Orbax v0 leaves the data where it is",
        "elastic_ckpt/integrations/orbax_v0.py",
        "load = functools.partial(component_io.load, args.item, directory)",
        "load = functools.partial(str, args.item)",
        ("tests/integrations/test_orbax_v0.py",),
    ),
    Fault(
        "the sidecar saves the state of a batch read ahead",
        "sidecar/elastic_ckpt_sidecar/worker.py",
        "            if each == number:",
        "            if each == self._states[-1][0]:",
        ("tests/sidecar/test_remote_iterator.py",),
    ),
    Fault(
        "the sidecar goes on from batches that were dropped",
        "sidecar/elastic_ckpt_sidecar/worker.py",
        "self.rewind(number)\n        course",
        "course",
        ("tests/sidecar/test_remote_iterator.py",),
    ),
    Fault(
        "a resumed scalar promotes what it is multiplied with",
        "elastic_ckpt/checkpoint/structure.py",
        'words = ["weak" if trees.is_weak(leaf) else "array"]',
        'words = ["array"]',
        ("tests/checkpoint/test_like_orbax.py",),
    ),
    Fault(
        "a component saves a growing list that it cannot load",
        "elastic_ckpt/checkpoint/components/encoding.py",
        'f"{path}/{n}", arrays, in_list=True)',
        'f"{path}/{n}", arrays)',
        ("tests/checkpoint/components/test_encoding.py",),
    ),
)
