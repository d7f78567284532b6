"""Mail between simulated hosts of one process, which counts what each host does."""

import collections

from elastic_ckpt.tiers.source import ReadError


class PostOffice:
    """The messages of all hosts; `messages` and `num_bytes` are by host.

    A message counts at the host that leaves it for others, and at each that reads it.
    """

    def __init__(self):
        self.posted = {}
        self.messages = collections.Counter()
        self.num_bytes = collections.Counter()

    def box(self, host):
        """The mail of one host."""
        return Box(self, host)


class Box:
    def __init__(self, office, host):
        self._office = office
        self._host = host

    def post(self, name, content):
        self._office.posted[self._host, name] = content

    def read(self, host, name):
        office = self._office
        content = office.posted.get((host, name))
        for each in (self._host, host):
            office.messages[each] += 1
            office.num_bytes[each] += len(content or b"")
        if content is None:
            raise ReadError(f"cannot be read: host {host} has no {name}")
        return content

    def deliver(self, host, name, content):
        self._office.posted[host, name] = content

    def remove(self, prefix):
        posted = self._office.posted
        for key in [key for key in posted if key[0] == self._host]:
            if key[1].startswith(prefix):
                del posted[key]
