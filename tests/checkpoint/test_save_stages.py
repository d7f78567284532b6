"""What is kept, told and tried again when a stage of a save fails."""

import threading

import pytest

from elastic_ckpt.checkpoint import save_stages
from elastic_ckpt.checkpoint.described import Described
from elastic_ckpt.host.hosts_failed import HostsFailed

SAVE = "7"
TIERS = ("local", "peer", "persistent")
COPIES = {
    "copies": 1,
    "bytes": 10,
    "problems": [],
    "diverged": [],
    "failed": False,
    "preserved": [2],
}
WRITTEN = {"files": {}, "time_ms": 0}


class OneHost:
    """Says what a test wants; `asked` are the phases and arguments, in order."""

    own = 0

    def __init__(self, **answers):
        self._answers = answers
        self.asked = []

    def all(self, phase, *arguments):
        self.asked.append((phase, *arguments))
        name = phase.partition(".")[2]
        if name == "say":
            return [arguments[0]]
        answer = self._answers.get(name, {**WRITTEN, "bytes": 0, "bad": []})
        if callable(answer):
            answer = answer(*arguments)
        if isinstance(answer, str):
            raise HostsFailed({0: answer})
        return [answer]

    def first(self, phase, *arguments):
        return self.all(phase, *arguments)[0]

    def of(self, phase):
        """The arguments of each call of a phase."""
        return [arguments for found, *arguments in self.asked if found == phase]


@pytest.fixture
def told():
    return []


@pytest.fixture
def stages(told):
    """Makes the stages of a world of one host that answers so."""

    def make(**answers):
        host = OneHost(**{"replicate": COPIES, "chunk_shapes": {"n": []}, **answers})
        tell = lambda name, **fields: told.append((name, fields))  # noqa: E731
        return save_stages.SaveStages(host, tell=tell), host

    return make


def saving(step, *, write_components=lambda: None, back_up=False):
    described = Described.of({"n": 1}, {}, metrics=None, custom_metadata=None)
    return save_stages.Saving(
        step=step,
        save=SAVE,
        write_components=write_components,
        back_up=back_up,
        described=described,
        overwrite=False,
        parents=(),
        began_secs=0,
    )


def save(made, step, **options):
    """Saves a step to the end of all stages; whether it was committed."""
    committed = made.begin(saving(step, **options)).result()
    made.wait()
    return committed


def reasons(told, tier):
    return [
        (fields["step"], fields["why"])
        for name, fields in told
        if name == "degraded" and fields["tier"] == tier
    ]


def test_the_newest_step_that_has_its_copies_is_kept_until_another_has(stages):
    failing = {2, 3}
    made, host = stages(replicate=lambda step, _: {**COPIES, "failed": step in failing})
    for step in (1, 2, 3, 4):
        save(made, step)
    kept = {step: in_flight for step, _, in_flight, *_ in host.of("saver.collect")}
    assert kept == {1: [1], 2: [1], 3: [1], 4: [4]}


def test_a_step_that_was_restored_is_kept_until_another_has_its_copies(stages):
    made, host = stages(replicate="copies do not fit")
    made.go_on_from(5)
    save(made, 6)
    assert host.of("saver.collect") == [[6, SAVE, [5], [], ()]]


def test_a_step_without_copies_is_not_kept_for_want_of_room(stages, told):
    full = {3}
    made, host = stages(
        write=lambda step, *_: "no room" if step in full else WRITTEN,
        replicate=lambda step, _: COPIES if step == 1 else "copies do not fit",
    )
    assert [save(made, step) for step in (1, 2, 3, 4)] == [True, True, False, True]
    kept = [(step, in_flight) for step, _, in_flight, *_ in host.of("saver.collect")]
    # The third does not fit: the first goes, and the second is the newest.
    assert kept == [(1, [1]), (2, [1]), (2, []), (4, [])]
    assert reasons(told, "local") == [(3, "it was not saved: host 0: no room")]


def test_a_step_whose_replicas_differ_replaces_none(stages):
    made, host = stages(
        replicate=lambda step, _: {**COPIES, "diverged": ["w"] if step == 2 else []}
    )
    for step in (1, 2):
        save(made, step)
    assert [step for step, *_ in host.of("saver.collect")] == [1]


def test_a_step_that_came_while_copies_were_made_gets_them_at_the_end(stages, told):
    copying, go_on = threading.Event(), threading.Event()

    def replicate(step, _):
        copying.set()
        assert step != 1 or go_on.wait(600)
        return COPIES

    made, host = stages(replicate=replicate)
    made.begin(saving(1)).result()
    assert copying.wait(600)
    assert made.begin(saving(2)).result()
    go_on.set()
    made.wait()
    assert [step for step, _ in host.of("saver.replicate")] == [1, 2]
    ((step, why),) = reasons(told, "peer")
    assert step == 2
    assert why.startswith("copies of an earlier step are not done")


@pytest.mark.parametrize("error", [OSError("disk full"), TypeError("no such thing")])
def test_what_a_component_raises_is_told_and_fails_the_save_alone(stages, told, error):
    def fail():
        raise error

    made, _ = stages(
        # The last argument is what the components raised.
        write=lambda *arguments: arguments[-1] or WRITTEN
    )
    assert not save(made, 1, write_components=fail)
    ((step, why),) = reasons(told, "local")
    assert step == 1
    assert str(error) in why
    assert save(made, 2)


def test_a_backup_begins_when_no_holder_changes_any_more(stages):
    begun, go_on = threading.Event(), threading.Event()

    def replicate(step, _):
        del step
        begun.set()
        assert go_on.wait(600)
        return COPIES

    made, host = stages(replicate=replicate)
    made.begin(saving(1, back_up=True)).result()
    assert begun.wait(600)
    assert not host.of("backup.chunk_shapes")
    go_on.set()
    made.wait()
    assert host.of("backup.commit")


def test_of_backups_that_are_late_the_newest_is_made(stages, told):
    backing_up, go_on = threading.Event(), threading.Event()

    def back_up(step, *_):
        backing_up.set()
        assert step != 1 or go_on.wait(600)
        return "storage is gone" if step == 1 else {"bytes": 3, "bad": []}

    made, host = stages(back_up=back_up)
    made.begin(saving(1, back_up=True)).result()
    assert backing_up.wait(600)
    made.begin(saving(2, back_up=True)).result()
    made.begin(saving(3)).result()
    go_on.set()
    made.wait()
    assert [step for step, *_ in host.of("backup.back_up")] == [1, 2]
    assert [fields["step"] for name, fields in told if name == "backed_up"] == [2]


def test_a_first_save_while_leftovers_are_removed_is_backed_up_and_not_degraded(
    stages, told
):
    is_committed = threading.Event()
    order = []

    def clean(_):
        assert is_committed.wait(60)
        order.append("clean")
        return []

    def back_up(*_):
        order.append("back_up")
        return {"bytes": 0, "bad": []}

    made, _ = stages(clean=clean, back_up=back_up)
    made.clean(0, SAVE)
    assert made.begin(saving(1, back_up=True)).result()
    is_committed.set()
    made.wait()
    assert order == ["clean", "back_up"]
    assert [name for name, _ in told if name in ("degraded", "backed_up")] == [
        "backed_up"
    ]


@pytest.mark.parametrize("stage", ["replicate", "back_up", "collect", "write"])
def test_an_error_of_a_stage_is_an_event_and_no_later_call_raises_it(
    stages, told, stage
):
    def fail(step, *_):
        if step == 1:
            raise TypeError("a bug")
        return {**COPIES, **WRITTEN, "bytes": 0, "bad": []}

    made, _ = stages(**{stage: fail})
    response = made.begin(saving(1, back_up=True))
    if stage == "write":
        with pytest.raises(TypeError, match="a bug"):
            response.result()
    else:
        assert response.result()
    made.wait()
    assert made.begin(saving(2, back_up=True)).result()
    made.wait()
    events = [each for tier in TIERS for each in reasons(told, tier)]
    assert events
    assert all("a bug" in why for _, why in events)
    assert [each["step"] for name, each in told if name == "backed_up"][-1:] == [2]


def test_what_cannot_be_described_is_given_up_on_all_hosts(stages, told, monkeypatch):
    made, host = stages(write=lambda *arguments: arguments[-1] or WRITTEN)
    with monkeypatch.context() as patch:
        patch.setattr(Described, "notes", lambda _: 1 / 0)
        assert not save(made, 1)
    ((step, why),) = reasons(told, "local")
    assert step == 1
    assert "ZeroDivisionError" in why
    assert host.of("saver.abandon") == [[1, SAVE]]
    assert save(made, 2)
