"""The runbook: what one sees, what to look at, and what to do.

It is a list, from which the page `reference/runbook` of the site is written: an entry
for each alert, by the name that its `runbook_url` leads to, one for each kind of
verdict, from the table that judges, and one for each class of errors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from elastic_ckpt.elastic import verdict

_PAGE = """\
# Runbook

Find the name of the alert that fired, that at the end of the verdict's line, or that of
the class in front of an error's message.
`RUN` is the directory of the run: `base_output_directory` and `run_name`. An error
names the file or host and the remedy itself; this page says where to look further.
[Watch runs with Prometheus and Grafana](../guides/monitoring.md) sets the alerts up.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What to do about one thing.

    Attributes:
      name: of the alert, the kind of verdict or the class of errors.
      symptom: what one sees.
      commands: to look closer, or to repair, in this order.
      remedy: what to do, in Markdown; links are those of a page in `reference/`.
    """

    name: str
    symptom: str
    commands: Sequence[str]
    remedy: str


def page() -> str:
    """The page, in Markdown."""
    lines = [_PAGE]
    for title, entries in SECTIONS.items():
        lines += [f"## {title}", ""]
        for entry in entries:
            lines += [f"### {entry.name}", "", entry.symptom, "", "```sh"]
            lines += [*entry.commands, "```", "", entry.remedy, ""]
    return "\n".join(lines)


_STATUS = "elastic-ckpt status RUN"
_EVENTS = "tail -n 20 RUN/events.jsonl"
_REPORT = "elastic-ckpt report RUN --no-audit"
_INSPECT = "elastic-ckpt inspect RUN"
_VERIFY = "elastic-ckpt verify RUN"
_CONFIG = "elastic-ckpt config my_run.yml"

ALERTS = (
    Entry(
        name="RunEndedEarly",
        symptom="The processes of the run are gone, or come and go without a step, and"
        " its last step is not done.",
        commands=(_STATUS, "grep -E 'run_(failed|stopped)' RUN/events.jsonl"),
        remedy="`run_failed` has the reason in `why`: look its error up below. After"
        " `run_stopped` somebody or the scheduler has stopped it. Without either the"
        " processes were killed: look at the log of the pod or job, and for the"
        " kernel's out-of-memory killer. Start the run with the same command; it"
        " continues from its newest complete step. If you have stopped it for good,"
        " silence the alert: it ends by itself after an hour.",
    ),
    Entry(
        name="RunMakesNoSteps",
        symptom="The processes live, and the number of steps does not grow.",
        commands=(_STATUS, _EVENTS),
        remedy="`status` names the phase. *Compiling*: wait, or set `jax_cache_dir`."
        " *Waiting for slices*: there are fewer than `elastic_min_slice_count`."
        " *Restoring*: storage is slow. *Training* without steps is a host that hangs:"
        " its supervisor ends it after `elastic_heartbeat_timeout_seconds`. Without a"
        " supervisor end the run and start it again. See [a slow"
        " run](../guides/slow-run.md#look-at-the-status).",
    ),
    Entry(
        name="RunGoodputLow",
        symptom="Less than half of the time trains new steps.",
        commands=(_REPORT,),
        remedy="The report and the panel *Where the time goes* divide the rest by its"
        " cause, and [a table](../guides/slow-run.md#look-at-the-report) says what"
        " helps with each.",
    ),
    Entry(
        name="RunLacksSlices",
        symptom="The run goes on with fewer slices than it had.",
        commands=(
            _STATUS,
            "grep -E 'slice_(lost|refused|quarantined)' RUN/events.jsonl",
        ),
        remedy="`why` has the reason of each. Replace or restart the machines of a"
        " slice that is lost; the run takes it back by itself. A slice that was"
        " refused computes wrong values: take its machines out of service. One that"
        " was quarantined has failed too often, and is used again after a new start of"
        " the run.",
    ),
    Entry(
        name="RunTargetDown",
        symptom="One process of the run does not answer Prometheus; others do.",
        commands=(_STATUS, "curl -sS http://HOST:PORT/metrics | head"),
        remedy="If the host's slice is lost, see [RunLacksSlices](#runlacksslices)."
        " Otherwise its port is not reachable: check `prometheus_interface` and the"
        " network policy. The run itself does not depend on it.",
    ),
    Entry(
        name="RunLossNotFinite",
        symptom="The loss is NaN or infinite.",
        commands=(_STATUS, "grep -E 'divergence|distrusted' RUN/events.jsonl"),
        remedy="Soon after a restore from RAM the run goes back to storage by itself"
        " (`distrust_steps`). Otherwise stop it and go back to a step from before, or"
        " have it do so: `divergence_action=rollback`. See [a loss that"
        " diverges](../guides/broken-run.md#a-loss-that-diverges).",
    ),
    Entry(
        name="RunDiverged",
        symptom="A detector or a callback has found a divergence.",
        commands=("grep divergence_found RUN/events.jsonl", _REPORT),
        remedy="`action` says what the run does about it. With `warn` it goes on, and"
        " it is for you to decide. See [a loss that"
        " diverges](../guides/broken-run.md#a-loss-that-diverges).",
    ),
    Entry(
        name="RunReplicasDiffer",
        symptom="Devices that should hold equal parts of the state do not.",
        commands=("grep replicas_differ RUN/events.jsonl",),
        remedy="The event names the leaf, and the hosts and devices whose values differ"
        " from most. Take these machines out of service, and go back to the step that"
        " `step_preserved` names: remove the newer ones from storage and RAM, and start"
        " the run again.",
    ),
    Entry(
        name="RunReadBadCopies",
        symptom="A restore has read copies whose digests were wrong.",
        commands=("elastic-ckpt verify --repair RUN",),
        remedy="Nothing wrong was loaded. Repeat `verify` without `--repair`: if copies"
        " are bad again, the disk or memory that it names is failing. See [check a"
        " checkpoint](../guides/broken-run.md#check-a-checkpoint).",
    ),
    Entry(
        name="RunRestoredFromStorage",
        symptom="The run has restored bytes from storage, though it has tiers in RAM.",
        commands=(_INSPECT,),
        remedy="More hosts were lost at once than the copies in RAM allow for."
        " `inspect` says what the loss of a host or slice would cost: if that happens"
        " more often, raise `peer_copies`. See [what"
        " survives](../guides/tiers.md#what-survives).",
    ),
    Entry(
        name="RunSavesFail",
        symptom="RAM, peers or storage did not take a step.",
        commands=("grep degraded RUN/events.jsonl | tail -n 5", _STATUS),
        remedy="`tier` and `cause` say which and why. `full`: free space, see [what you"
        " may delete](../guides/broken-run.md#what-you-may-delete). `refused` and"
        " `read_only`: the account may not write there. `unreachable` and `slow`: the"
        " network or the store. The run tries again with each later step, and emits"
        " `storage_recovered` when storage takes steps again.",
    ),
    Entry(
        name="RunSavesNothing",
        symptom="Saves begin and none is completed.",
        commands=("grep degraded RUN/events.jsonl | tail -n 5", _INSPECT),
        remedy="As for [RunSavesFail](#runsavesfail), but now all that was trained"
        " since the newest complete step is at stake: do not end the run before a save"
        " is complete.",
    ),
    Entry(
        name="RunBackupsBehind",
        symptom="Storage lacks steps that were due in it.",
        commands=(_STATUS, "grep degraded RUN/events.jsonl | tail -n 5"),
        remedy="With an event `degraded` see [RunSavesFail](#runsavesfail). Without one"
        " storage is slower than the interval between backups: compare"
        " `checkpoint/backup_secs` with it, and make backups rarer. Do not end the run:"
        " the steps are in RAM alone.",
    ),
    Entry(
        name="RunBlockedBySaves",
        symptom="The loop waits for saves for more than a tenth of the time.",
        commands=(_REPORT,),
        remedy="A save waits for the one before. Add a tier in RAM, or save less often."
        " See [is it saves?](../guides/slow-run.md#is-it-saves)",
    ),
    Entry(
        name="RunWaitsForData",
        symptom="The loop waits for batches for more than a tenth of the time.",
        commands=(_STATUS,),
        remedy="`status` names the host that waits longest. See [is it the"
        " data?](../guides/slow-run.md#is-it-the-data)",
    ),
    Entry(
        name="RunClaimsDisagree",
        symptom="Processes of two starts of one run are alive.",
        commands=(_STATUS, "grep world_claimed RUN/events.jsonl | tail -n 4"),
        remedy="The newest claim counts, and the older start stops at its next save"
        " with a ReplacedError. End its processes now, so that they give their"
        " machines back: they are those whose `elastic_ckpt_train_claim` is lower.",
    ),
)

ERRORS = (
    Entry(
        name="ElasticCkptError",
        symptom="The base class of all errors below.",
        commands=(_STATUS,),
        remedy="The message says what is wrong, where, and what to do.",
    ),
    Entry(
        name="ConfigError",
        symptom="The command ends at once, a run with status 78.",
        commands=(_CONFIG,),
        remedy="Correct the key that the message names; `config` shows where each key"
        " is set. A launcher need not start the run again before.",
    ),
    Entry(
        name="DataError",
        symptom="Training data are missing, empty or changed, or a data state does not"
        " fit them.",
        commands=(_CONFIG, "elastic-ckpt inspect RUN"),
        remedy="Put the files back as they were when the run began, or start another"
        " run with another `run_name`. See [corrupt"
        " records](../guides/broken-run.md#corrupt-records).",
    ),
    Entry(
        name="CorruptError",
        symptom="Records of a data file differ from what was written.",
        commands=("sha256sum FILE",),
        remedy="Compare the file with its origin and copy it again. See [corrupt"
        " records](../guides/broken-run.md#corrupt-records) for how a run leaves a few"
        " of them out.",
    ),
    Entry(
        name="CheckpointError",
        symptom="A step is of another run, or lacks parts that no tier has.",
        commands=(_INSPECT, _VERIFY),
        remedy="The message names the newest complete step. See [lost machines and"
        " missing parts](../guides/broken-run.md#lost-machines-and-missing-parts) and"
        " [a run that was moved or"
        " renamed](../guides/broken-run.md#a-run-that-was-moved-or-renamed).",
    ),
    Entry(
        name="NotStoredError",
        symptom="The run has ended, and a step that was due in storage is not there.",
        commands=(_INSPECT, _STATUS),
        remedy="Repair storage as the message says, and start the run once more while"
        " the RAM of the hosts has the step: it is backed up then. A reboot of the"
        " machines loses it.",
    ),
    Entry(
        name="OtherModelError",
        symptom="The tree of the checkpoint is not that of the model.",
        commands=("elastic-ckpt inspect RUN", "elastic-ckpt convert --list SOURCE"),
        remedy="Set the keys of the model as they were, or choose another `run_name`."
        " For weights of another program give their layout, `init_from_layout`.",
    ),
    Entry(
        name="HostsFailedError",
        symptom="Some hosts could not do their part of a save or restore.",
        commands=(_STATUS,),
        remedy="The message has the reason of each host. If it is one host, look at its"
        " machine; if it is all, at what they share: storage or the network.",
    ),
    Entry(
        name="StepAlreadyExistsError",
        symptom="A loop saves a step that exists.",
        commands=(_INSPECT,),
        remedy="Continue after the newest step, `checkpointer.latest.step`, or save"
        " with `overwrite=True`.",
    ),
    Entry(
        name="StepNotFoundError",
        symptom="The step that was asked for is in no tier.",
        commands=("elastic-ckpt inspect RUN --all",),
        remedy="Ask for one that is listed. Retention may have removed it:"
        " `elastic-ckpt pin` keeps a step.",
    ),
    Entry(
        name="StepGoneError",
        symptom="A program that follows a run finds that its step was removed.",
        commands=(_INSPECT,),
        remedy="Take the newest step, as `ec.watch_steps` does by itself, or keep steps"
        " while you read them with `ec.lease`.",
    ),
    Entry(
        name="LaterVersionError",
        symptom="A newer version of elastic_ckpt has written the step.",
        commands=("elastic-ckpt --version",),
        remedy="Install that version or a newer one on all hosts.",
    ),
    Entry(
        name="FormatError",
        symptom="A file of another program is damaged, unsafe or of an unknown format.",
        commands=("sha256sum FILE", "elastic-ckpt convert --list SOURCE"),
        remedy="Compare it with its origin and copy it again. [Formats of other"
        " programs](formats/other-programs.md) lists what can be read.",
    ),
    Entry(
        name="LayoutError",
        symptom="A layout is malformed, or does not fit its checkpoint or its tree.",
        commands=("elastic-ckpt convert --list SOURCE",),
        remedy="Correct the rule that the message quotes. [The grammar of"
        " rules](layout-rules.md) explains each.",
    ),
    Entry(
        name="NoValueError",
        symptom="Arithmetic of a layout has no value for the sizes of a checkpoint.",
        commands=("elastic-ckpt convert --list SOURCE",),
        remedy="Look whether the layout is that of this model; a size that is no"
        " whole number is usually one that the layout does not mean.",
    ),
    Entry(
        name="UnknownSizeError",
        symptom="The shapes of a checkpoint do not determine a size of its layout.",
        commands=("elastic-ckpt convert --list SOURCE",),
        remedy="Give the size in the layout, below `sizes:`.",
    ),
    Entry(
        name="RunError",
        symptom="A run cannot start or continue.",
        commands=(_STATUS, _EVENTS),
        remedy="The message names the host and its first error. Start the run with the"
        " same command once the cause is gone. If another live program holds the run,"
        " see [another program's lock](../guides/broken-run.md#another-programs-lock).",
    ),
    Entry(
        name="WorldLostError",
        symptom="Hosts or devices were lost, and with them the world.",
        commands=(_STATUS, "grep -E 'host_lost|slice_lost' RUN/events.jsonl"),
        remedy="An elastic run goes on in another world and shows this only when it may"
        " not try again (`elastic_max_retries`). Otherwise start it again, on the"
        " machines that are left.",
    ),
    Entry(
        name="ProgramFailedError",
        symptom="The program itself failed: all hosts raised at one step, or the same"
        " error came again there in the next world. The message begins with its"
        " traceback.",
        commands=("grep verdict RUN/events.jsonl", _REPORT),
        remedy="Correct the program at the line that the traceback names, and start the"
        " run again: it continues from its newest step.",
    ),
    Entry(
        name="ReplacedError",
        symptom="Another start has continued the run.",
        commands=(_STATUS,),
        remedy="Nothing is to be done: the newer start counts. If that was not meant,"
        " end it, and start the run once.",
    ),
    Entry(
        name="DivergedError",
        symptom="A detector or callback has ended the run.",
        commands=("grep -E 'divergence_found|rolled_back' RUN/events.jsonl", _REPORT),
        remedy="Look for the cause in the data or the learning rate at that step. See"
        " [a loss that diverges](../guides/broken-run.md#a-loss-that-diverges).",
    ),
    Entry(
        name="StoppedError",
        symptom="The run got SIGTERM and could not save before it ended.",
        commands=(_INSPECT,),
        remedy="It continues from the newest complete step. Give it more time: a longer"
        " grace period of the pod or job. See [what SIGTERM"
        " leaves](../guides/leaving.md).",
    ),
    Entry(
        name="LeadershipLostError",
        symptom="This machine does not lead the run any more.",
        commands=(_STATUS, "grep leader_found RUN/events.jsonl"),
        remedy="Another machine holds the claim in storage and leads, and the run goes"
        " on. Start the command on this machine again, so that it follows.",
    ),
    Entry(
        name="HandedOverError",
        symptom="This machine got SIGTERM and has handed the run over.",
        commands=(_STATUS,),
        remedy="Nothing is to be done. Start the command on this machine again when it"
        " is back.",
    ),
)

_VERDICT = "grep '\"verdict\"' RUN/events.jsonl | tail -n 1"
_LOGS = "tail -n 40 $(ls -td RUN/logs/*/ | head -n 1)host-*.log"
# The commands that show more, by what a verdict says has failed.
_BY_WHAT: Mapping[verdict.What, Sequence[str]] = {
    verdict.What.HOST: (_VERDICT, _LOGS),
    verdict.What.SLICE: (_VERDICT, _STATUS),
    verdict.What.MACHINE: (_VERDICT, _STATUS),
    verdict.What.DEVICE: (_VERDICT, _LOGS),
    verdict.What.STORAGE: (_VERDICT, _INSPECT),
    verdict.What.NETWORK: (_VERDICT, _STATUS),
    verdict.What.DATA: (_VERDICT, _LOGS),
    verdict.What.PROGRAM: (_VERDICT, _LOGS),
}


def _of_verdict(kind: verdict.Kind) -> Entry:
    # Links of remedies are those of a guide.
    remedy = re.sub(r"\]\((?=[\w-]+\.md)", "](../guides/", kind.remedy)
    if remedy.startswith("["):
        remedy = f"see {remedy}"
    return Entry(
        name=kind.name,
        symptom=f"The run says `{kind.what} ... {kind.meaning}: {kind.action}`.",
        commands=_BY_WHAT[kind.what],
        remedy=f"{remedy[0].upper()}{remedy[1:]}.",
    )


VERDICTS = tuple(map(_of_verdict, verdict.KINDS))
SECTIONS: Mapping[str, Sequence[Entry]] = {
    "Alerts": ALERTS,
    "Verdicts": VERDICTS,
    "Errors": ERRORS,
}
