"""The pods of a generated JobSet as process groups of this machine.

Each pod is at a loopback address, and the run is in a bucket of an emulator. The text
of the ConfigMap and the variables of the container are those of the manifest; only the
names of pods, which this machine lacks, are replaced. A pod that is killed loses its
RAM disk. Backup hosts are pods, too, with RAM disks apart from the others.
"""

import os
import re
import signal
import subprocess

from elastic_ckpt.core import storage
from elastic_ckpt.deploy import manifest, program
from elastic_ckpt.training import load, run_directory
from tests import runs
from tests.deploy import jobsets
from tests.processes import backup_hosts as started_backups
from tests.processes import supervisors as started_supervisors


class Pods(started_supervisors.Supervisors):
    """The pods of an elastic run, by their numbers.

    Args:
      config: of the run, which is in a bucket.
      ram: the RAM disk of all pods, which have a directory for each slice there.

    Attributes:
      backups: the backup hosts of the manifest.
    """

    def __init__(self, config, ram):
        self.directory, self.ram = config.parent, ram
        loaded = load.load(config, ["docker_image=registry/image:1"])
        self.run = storage.absolute(run_directory.path_of(loaded))
        assert not storage.is_local(self.run)
        built = manifest.documents(loaded)
        jobs = {
            each["name"]: each["template"]["spec"]
            for each in jobsets.only("JobSet", built)["spec"]["replicatedJobs"]
        }
        job = jobs.pop(program.JOB)
        (self._container,) = job["template"]["spec"]["containers"]
        numbers = range(job["completions"])
        replaced = {}
        self.backups = []
        if backup_job := jobs.pop(program.BACKUP_JOB, None):
            replaced = self._start_backups(backup_job)
        assert not jobs
        self._files = self.directory / "mounted"
        self._files.mkdir()
        for name, text in jobsets.only("ConfigMap", built)["data"].items():
            for remote, local in replaced.items():
                assert remote in text
                text = text.replace(remote, local)
            (self._files / name).write_text(text)
        self._network = None
        self.started = {}
        for number in numbers:
            self.start(number)

    def __exit__(self, *error):
        super().__exit__(*error)
        for backup in self.backups:
            backup.kill()

    def start(self, number):
        """Starts a pod, the first or one that replaces another, as its Job does."""
        program, *arguments = self._container["command"]
        assert program == "elastic-ckpt"
        mounts = self._container["volumeMounts"]
        (mounted,) = (each["mountPath"] for each in mounts if each["name"] == "config")
        words = [word.replace(mounted, str(self._files)) for word in arguments]
        with open(self._output(number), "ab") as output:
            self.started[number] = subprocess.Popen(
                self._command(words),
                cwd=runs.ROOT,
                env={**self._environment(), **self._variables(number)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def hosts(self, number):
        """The host processes in a pod, by the names of their logs."""
        logs = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if os.getsid(int(name)) != self.started[number].pid:
                    continue
                log = os.path.basename(os.readlink(f"/proc/{name}/fd/1"))
            except (FileNotFoundError, ProcessLookupError):
                continue
            if re.fullmatch(r"host-\d+\.log", log):
                logs[int(name)] = log
        return logs

    def kill_hosts(self, number):
        """Kills the hosts in a pod, and not its supervisor."""
        hosts = self.hosts(number)
        assert hosts
        for pid in hosts:
            os.kill(pid, signal.SIGKILL)

    def _start_backups(self, job):
        """Starts the backup hosts; returns their addresses by those in the manifest."""
        (container,) = job["template"]["spec"]["containers"]
        (port,) = (each["containerPort"] for each in container["ports"])
        executable, verb, directory, *words = container["command"]
        assert (executable, verb) == ("elastic-ckpt", "agent")
        # It is below a volume of the pod.
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        (volume,) = (each for each in mounts if directory.startswith(f"{each}/"))
        addresses = {}
        for number in range(job["completions"]):
            local = {"$(POD_IP)": self._ip(10 + number), str(port): "0"}
            ram = os.path.join(self.ram, f"backup-{number}")
            backup = started_backups.BackupHost(
                directory.replace(volume, ram),
                *(local.get(word, word) for word in words),
            )
            self.backups.append(backup)
            name = f"tiny-{program.BACKUP_JOB}-0-{number}.tiny:{port}"
            addresses[name] = backup.url.removeprefix("http://")
        return addresses

    def _command(self, words):
        """The program with these arguments."""
        return runs.command(*words)

    def _environment(self):
        """The variables of the image."""
        return runs._environment()

    def _variables(self, number):
        fields = {"status.podIP": self._ip(number)}
        values = {"JOB_COMPLETION_INDEX": str(number)}
        for each in self._container["env"]:
            value = each.get("value")
            if value is None:
                value = fields.get(each["valueFrom"]["fieldRef"]["fieldPath"], "zone-a")
            values[each["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: values[match[1]], value
            )
        return values

    def _ip(self, number):
        return f"127.0.0.{number + 1}"
