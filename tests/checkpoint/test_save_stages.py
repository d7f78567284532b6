"""The steps that are kept, reported and retried when a stage of a save fails."""

import dataclasses
import threading
import types

import pytest

from elastic_ckpt.checkpoint import save_stages
from elastic_ckpt.checkpoint.host import answers
from elastic_ckpt.checkpoint.host.answers import HostsFailedError
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import calls, errors
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.choices import Peers

SAVE = "7"
TIERS = ("local", "peer", "persistent")
COPIES = answers.Replicated(
    copies=1, num_bytes=10, problems=(), failed=False, preserved=(2,)
)
PLACED = answers.Placed(problems=(), diverged=(), failed=False)
WRITTEN = answers.Written(files={}, time_ms=0)
BACKED_UP = answers.BackedUp(num_bytes=0, bad=())


class FakeHosts:
    """Answers each method as a test defines; `calls` lists what was called, in order.

    All hosts give the same answers: a value, a function of the call, or the text of a
    failure.
    """

    own = 0

    def __init__(self, answers, num_hosts):
        self._answers = answers
        self.calls = []
        self.num_hosts = num_hosts

    def all(self, method, *args, **kwargs):
        arguments = calls.of(method).bind(*args, **kwargs)
        if "step_id" in arguments:
            arguments["step"] = arguments["step_id"].step
        call = types.SimpleNamespace(method=method, **arguments)
        self.calls.append(call)
        answer = self._answers.get(method)
        if callable(answer):
            answer = answer(call)
        if isinstance(answer, str):
            raise HostsFailedError({0: answer})
        return [answer] * self.num_hosts

    def first(self, method, *args, **kwargs):
        return self.all(method, *args, **kwargs)[0]

    def share(self, name, value):
        del name
        return [value]

    def calls_of(self, method):
        """The calls of a method."""
        return [call for call in self.calls if call.method is method]


@pytest.fixture
def emitted():
    return []


@pytest.fixture
def stages(emitted):
    """Makes the stages of a world with peers, of one host that answers so, or more."""

    def make(answers=None, *, num_hosts=1):
        host = FakeHosts(
            {
                HostSaver.write: WRITTEN,
                HostWorld.merge_parts: (),
                HostWorld.pass_parts: (),
                HostCopies.place: PLACED,
                HostCopies.take: COPIES,
                HostBackup.chunk_shapes: {"n": ()},
                HostBackup.back_up: BACKED_UP,
                HostBackup.clean: (),
            }
            | (answers or {}),
            num_hosts,
        )
        tell = lambda name, **fields: emitted.append((name, fields))  # noqa: E731
        return save_stages.SaveStages(host, peers=Peers(), emit=tell), host

    return make


def saving(step, *, write_components=lambda: None, back_up=False):
    description = StepDescription.from_trees(
        {"n": 1}, {}, metrics=None, custom_metadata=None
    )
    return Saving(
        step_id=StepId(step, SAVE),
        write_components=write_components,
        back_up=back_up,
        description=description,
        overwrite=False,
        parents=(),
        began_secs=0,
    )


def save(made, step, **options):
    """Saves a step to the end of all stages; whether it was committed."""
    committed = made.begin(saving(step, **options)).result()
    made.wait()
    return committed


def reasons(emitted, tier):
    return [
        (fields["step"], fields["why"])
        for name, fields in emitted
        if name == "degraded" and fields["tier"] == tier
    ]


def test_the_newest_step_that_has_its_copies_is_kept_until_another_has(stages):
    failing = {2, 3}
    made, host = stages(
        {
            HostCopies.take: lambda request: dataclasses.replace(
                COPIES, failed=request.step in failing
            )
        }
    )
    for step in (1, 2, 3, 4):
        save(made, step)
    kept = {each.step: each.in_flight for each in host.calls_of(HostSaver.collect)}
    assert kept == {1: (1,), 2: (1,), 3: (1,), 4: (4,)}


def test_a_step_that_was_restored_is_kept_until_another_has_its_copies(stages):
    made, host = stages({HostCopies.take: "copies do not fit"})
    made.go_on_from(5)
    save(made, 6)
    (collected,) = host.calls_of(HostSaver.collect)
    assert (collected.step, collected.in_flight, collected.parents) == (6, (5,), ())


def test_a_step_without_copies_is_not_kept_for_want_of_room(stages, emitted):
    full = {3}
    made, host = stages(
        {
            HostSaver.write: lambda each: "no room" if each.step in full else WRITTEN,
            HostCopies.take: lambda each: COPIES if each.step == 1 else "no room",
        }
    )
    assert [save(made, step) for step in (1, 2, 3, 4)] == [True, True, False, True]
    kept = [(each.step, each.in_flight) for each in host.calls_of(HostSaver.collect)]
    # The third does not fit: the first goes, and the second is the newest.
    assert kept == [(1, (1,)), (2, (1,)), (2, ()), (4, ())]
    assert reasons(emitted, "local") == [(3, "it was not saved: host 0: no room")]


def test_a_step_whose_replicas_differ_replaces_none(stages):
    made, host = stages(
        {
            HostCopies.place: lambda request: dataclasses.replace(
                PLACED, diverged=("w",) if request.step == 2 else ()
            )
        }
    )
    for step in (1, 2):
        save(made, step)
    assert [each.step for each in host.calls_of(HostSaver.collect)] == [1]


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_step_that_came_while_copies_were_made_gets_them_at_the_end(
    stages, emitted, num_hosts
):
    copying, go_on = threading.Event(), threading.Event()

    def replicate(request):
        copying.set()
        assert request.step != 1 or go_on.wait(600)
        return COPIES

    made, host = stages({HostCopies.take: replicate}, num_hosts=num_hosts)
    made.begin(saving(1)).result()
    assert copying.wait(600)
    for step in (2, 3, 4):
        assert made.begin(saving(step)).result()
    go_on.set()
    made.wait()
    assert [each.step for each in host.calls_of(HostCopies.take)] == [1, 4]
    reported = reasons(emitted, "peer")
    # One host copies nothing, and several report it once.
    assert [step for step, _ in reported] == [2] * (num_hosts > 1)
    for _, why in reported:
        assert why.startswith("copies of an earlier step are not done")


def test_steps_without_copies_are_reported_again_once_copies_kept_up(stages, emitted):
    may_copy = {step: threading.Event() for step in range(1, 9)}

    def replicate(request):
        assert may_copy[request.step].wait(600)
        return COPIES

    made, _ = stages({HostCopies.take: replicate}, num_hosts=2)
    for slow in (1, 5):
        made.begin(saving(slow)).result()
        made.begin(saving(slow + 1)).result()
        for event in may_copy.values():
            event.set()
        made.wait()
        for step in (slow + 2, slow + 3):
            save(made, step)
        for event in may_copy.values():
            event.clear()
    assert [step for step, _ in reasons(emitted, "peer")] == [2, 6]


def test_a_peer_that_does_not_answer_is_reported_once(stages, emitted):
    url = "http://10.0.0.7:80"
    why = [
        f"the list of steps cannot be read: {url} fails (refused)",
        f"the list of steps was not asked for: {url} has failed (refused), and is left"
        " alone for 30 s",
    ]
    made, _ = stages(
        {
            HostCopies.place: lambda request: dataclasses.replace(
                PLACED, problems=(why[request.step % 2],)
            )
        }
    )
    for step in (2, 3, 4):
        save(made, step)
    assert reasons(emitted, "peer") == [(2, why[0])]


@pytest.mark.parametrize("error", [OSError("disk full"), TypeError("no such thing")])
def test_what_a_component_raises_is_told_and_fails_the_save_alone(
    stages, emitted, error
):
    def fail():
        raise error

    made, _ = stages({HostSaver.write: lambda request: request.problem or WRITTEN})
    assert not save(made, 1, write_components=fail)
    ((step, why),) = reasons(emitted, "local")
    assert step == 1
    assert str(error) in why
    assert save(made, 2)


def test_a_backup_begins_when_no_holder_changes_any_more(stages):
    begun, go_on = threading.Event(), threading.Event()

    def replicate(_):
        begun.set()
        assert go_on.wait(600)
        return COPIES

    made, host = stages({HostCopies.take: replicate})
    made.begin(saving(1, back_up=True)).result()
    assert begun.wait(600)
    assert not host.calls_of(HostBackup.chunk_shapes)
    go_on.set()
    made.wait()
    assert host.calls_of(HostBackup.commit)


def test_of_backups_that_are_late_the_newest_is_made(stages, emitted):
    backing_up, go_on = threading.Event(), threading.Event()

    def back_up(request):
        backing_up.set()
        assert request.step != 1 or go_on.wait(600)
        return "storage is gone" if request.step == 1 else BACKED_UP

    made, host = stages({HostBackup.back_up: back_up})
    made.begin(saving(1, back_up=True)).result()
    assert backing_up.wait(600)
    made.begin(saving(2, back_up=True)).result()
    made.begin(saving(3)).result()
    go_on.set()
    made.wait()
    assert [each.step for each in host.calls_of(HostBackup.back_up)] == [1, 2]
    assert [fields["step"] for name, fields in emitted if name == "backed_up"] == [2]


def test_a_first_save_while_leftovers_are_removed_is_backed_up_and_not_degraded(
    stages, emitted
):
    is_committed = threading.Event()
    order = []

    def clean(_):
        assert is_committed.wait(60)
        order.append("clean")
        return ()

    def back_up(_):
        order.append("back_up")
        return BACKED_UP

    made, _ = stages({HostBackup.clean: clean, HostBackup.back_up: back_up})
    made.clean(StepId(0, SAVE))
    assert made.begin(saving(1, back_up=True)).result()
    is_committed.set()
    made.wait()
    assert order == ["clean", "back_up"]
    assert [name for name, _ in emitted if name in ("degraded", "backed_up")] == [
        "backed_up"
    ]


@pytest.mark.parametrize(
    ("stage", "good"),
    [
        (HostCopies.take, COPIES),
        (HostBackup.back_up, BACKED_UP),
        (HostSaver.collect, None),
        (HostBackup.collect, None),
        (HostSaver.write, WRITTEN),
    ],
)
def test_an_error_of_a_stage_is_an_event_and_no_later_call_raises_it(
    stages, emitted, stage, good
):
    def fail(request):
        if request.step == 1:
            raise TypeError("a bug")
        return good

    made, _ = stages({stage: fail})
    response = made.begin(saving(1, back_up=True))
    if stage is HostSaver.write:
        with pytest.raises(TypeError, match="a bug"):
            response.result()
    else:
        assert response.result()
    made.wait()
    assert made.begin(saving(2, back_up=True)).result()
    made.wait()
    events = [each for tier in TIERS for each in reasons(emitted, tier)]
    assert events
    assert all("a bug" in why for _, why in events)
    assert [each["step"] for name, each in emitted if name == "backed_up"][-1:] == [2]


@pytest.mark.parametrize("stage", [HostSaver.write, HostBackup.back_up])
def test_a_host_that_is_missing_is_named_at_the_end(stages, emitted, stage):
    missing = (
        "host 0 waited for 1 (HostBackup.back_up) for 14 s; look at the log of the host"
    )

    def fail(_):
        raise errors.RunError(missing)

    made, _ = stages({stage: fail})
    response = made.begin(saving(1, back_up=True))
    remedy = "start the run once more while the hosts' RAM has the step"
    if stage is HostSaver.write:
        with pytest.raises(errors.RunError, match="waited for 1"):
            response.result()
        assert reasons(emitted, "local") == [(1, missing)]
        remedy = (
            "save it again: no tier has it, and a start goes on from the newest step"
            " that was saved"
        )
    with pytest.raises(errors.CheckpointError) as caught:
        made.end()
    assert str(caught.value) == (
        f"step 1 was due in persistent storage and is not there: {missing}; {remedy}"
    )


def test_what_cannot_be_described_is_given_up_on_all_hosts(
    stages, emitted, monkeypatch
):
    made, host = stages({HostSaver.write: lambda request: request.problem or WRITTEN})
    with monkeypatch.context() as patch:
        patch.setattr(StepDescription, "notes", lambda *_: 1 / 0)
        assert not save(made, 1)
    ((step, why),) = reasons(emitted, "local")
    assert step == 1
    assert "ZeroDivisionError" in why
    assert [each.step for each in host.calls_of(HostSaver.abandon)] == [1]
    assert save(made, 2)


@pytest.mark.parametrize("left_secs", [0.0, 0.01])
def test_the_last_backup_waits_until_peers_that_failed_are_asked_again(
    stages, emitted, left_secs
):
    asked = []

    def left(request):
        asked.append(request)
        return left_secs

    made, _ = stages(
        {
            HostBackup.chunk_shapes: lambda _: (
                {"n": ()} if asked and left_secs else "step 1 lacks parts of 3 leaves"
            ),
            HostWorld.secs_until_peers_are_asked: left,
        }
    )
    made.begin(saving(1, back_up=True)).result()
    if left_secs:
        made.end()
        assert [fields["step"] for name, fields in emitted if name == "backed_up"] == [
            1
        ]
    else:
        with pytest.raises(errors.CheckpointError, match="lacks parts of 3 leaves"):
            made.end()
