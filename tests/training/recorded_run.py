"""A simulated run: the rows it trained on, its step log and its saved data states."""

from elastic_ckpt.core import digest
from elastic_ckpt.data import elastic_data, rows, stages, state
from elastic_ckpt.training import provenance, step_log
from tests import formats

# Where each token of the documents is from: file, record and index; and the tokens of
# each document.
ORIGINS, SIZES = {}, {}
for _name, _counts in formats.DATASETS.items():
    _places = [(f"{_name}-{_f}", _n) for _f, _n in enumerate(_counts)]
    _places = [(_file, _n) for _file, _count in _places for _n in range(_count)]
    for _number, _place in enumerate(_places):
        _tokens = formats.tokens(_name, _number).tolist()
        SIZES[_place] = len(_tokens)
        ORIGINS |= {_t: (*_place, _i) for _i, _t in enumerate(_tokens)}


def pieces_of(inputs):
    """The pieces of documents in the tokens of a row, in order."""
    pieces = []
    for token in inputs[inputs > 0].tolist():
        *document, index = ORIGINS[token]
        if pieces and pieces[-1][:2] == document and sum(pieces[-1][2:]) == index:
            pieces[-1][3] += 1
        else:
            pieces.append([*document, index, 1])
    return [tuple(each) for each in pieces]


def recorded(batch, step, *, attempt=1):
    """The record of a batch that a step was trained on."""
    ids = elastic_data.join_ids(batch["example_id"])
    return step_log.StepRecord(
        step=step,
        row=step_log.first_row(ids),
        rows=len(ids),
        digest=step_log.batch_digest(ids, digest.row_digests(batch)),
        loss=1.0,
        attempt=attempt,
    )


def reader(cursors):
    return lambda shards: {shard: cursors[shard] for shard in shards}


def attempt_of(records, **changes):
    """An attempt that logs these steps, on one host unless it is said otherwise."""
    header = {"attempt": 1, "start_step": 0, "hosts": 1, "slices": 1, "devices": 1}
    header |= {"data": {}, "world": 0, "left_out": (), **changes}
    return step_log.Attempt(**header, records=tuple(records))


class Run:
    """The attempts of a run, one after the other, on one host."""

    def __init__(self):
        self.attempts, self.saved = [], []
        self.data, self.after, self.left_out = {}, {}, ()
        self.host, self.read = None, None
        # The tokens of the rows of each step of each attempt.
        self.inputs = {}

    def attempt(self, data, sizes, *, start=0, goes_back=False, saves=()):
        """Trains from step `start` on, with batches of these sizes.

        If it `goes_back`, it leaves out what the attempt before took since; `saves` has
        the steps after which the data state is saved. A size below 0 is of a batch that
        is read, and never trained on.
        """
        number = len(self.attempts) + 1
        self.data[number] = data
        position, cursors = self.after.get(start, (None, {}))
        if goes_back:
            row = state.row_of(position) if position else 0
            earlier = [each for each in self.left_out if each[1] <= row]
            position, cursors = self.end
            self.left_out = (*earlier, (row, state.row_of(position)))
        logged = []
        for size in sizes:
            # Batches of nothing but padding are no steps.
            step = start + len(logged)
            of_step = stages.at(data, step)
            batch, position, cursors = self._read(of_step, abs(size), position, cursors)
            self.end = position, cursors
            if size < 0 or ("mask" in batch and not batch["mask"].any()):
                continue
            self.after[step + 1] = position, cursors
            logged.append(recorded(batch, step, attempt=number))
            self.inputs[number, step] = batch["inputs"]
            if step + 1 in saves:
                self._save(step + 1, data, position, cursors)
        header = {"attempt": number, "start_step": start, "left_out": self.left_out}
        data = {"number": str(data.identity())}
        self.attempts.append(attempt_of(logged, **header, data=data))
        return self

    def _read(self, data, size, position, cursors):
        if self.host is None or self.read != (size, position, data):
            placement = rows.in_order(1, size)[0]
            self.host = data.host_batches(placement)
            if position:
                self.host.go_to(position, reader(cursors))
        batch = next(self.host)
        position, held = self.host.get_state()
        self.read = size, position, data
        return batch, position, dict(held)

    def _save(self, step, data, position, cursors):
        saved = state.DataState(
            engine=data.engine,
            position=position,
            pipeline=data.identity(),
            left_out=self.left_out,
            progress=stages.Course.first(data, 1).at_step(step).progress,
        )
        self.saved.append((saved, reader(cursors)))

    def data_of(self, record):
        return stages.at(self.data[record.attempt], record.step)

    def provenance(self, *, saved=True):
        states = self.saved if saved else ()
        return provenance.Provenance(self.attempts, self.data_of, saved=states)
