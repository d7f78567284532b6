"""Hosts of this machine that run any program, as those of one world."""

import contextlib
import math

from elastic_ckpt.core import events
from elastic_ckpt.elastic import cluster, decision, process_cluster, station, watch
from elastic_ckpt.elastic.host import Hardware


class Station(station.Station):
    """Its hosts run one program of a member and a channel, which may join or not."""

    def __init__(self, program, *, num_hosts, log_directory):
        self._program = program
        super().__init__(
            Hardware(hosts=num_hosts, slices=num_hosts),
            log_directory=str(log_directory),
        )

    def program(self, assignment):
        del assignment
        return self._program


def assignment(number, num_hosts):
    """A world of one host a slice."""
    work = decision.Train(
        slices=tuple(range(num_hosts)), spares=(), rows=0, accumulated=1
    )
    return cluster.Assignment(number=number, work=work)


@contextlib.contextmanager
def opened(program, *, num_hosts, log_directory, limits=None, injected=()):
    """A cluster whose hosts run a program."""
    limits = limits or watch.Limits(most_secs=math.inf, heartbeat_secs=math.inf)
    own = Station(program, num_hosts=num_hosts, log_directory=log_directory)
    with contextlib.closing(own):
        machines = process_cluster.Machines(own)
        with process_cluster.ProcessCluster(
            machines, limits=limits, injected=injected
        ) as hosts:
            yield hosts


def run(
    program,
    *,
    num_hosts,
    log_directory,
    emit=events.nobody,
    limits=None,
    look=lambda _: None,
):
    """Runs a program on hosts, and returns when all have ended.

    Args:
      program: a picklable function of a member and a channel.
      num_hosts: how many there are.
      log_directory: for a directory with their output.
      emit: called for their events.
      limits: how long they may take; by default for ever.
      look: called often, with the hosts.

    Raises:
      RunError: as `Cluster.run_world`.
    """
    made = {"num_hosts": num_hosts, "log_directory": log_directory, "limits": limits}
    with opened(program, **made) as hosts:
        hosts.run_world(
            program,
            assignment(1, num_hosts),
            emit=emit,
            has_changed=lambda: look(hosts),
        )
