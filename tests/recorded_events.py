"""An `Emit` for tests."""

from elastic_ckpt.core import events


class RecordedEvents:
    """Checks each event, as a run does, and records it."""

    def __init__(self):
        self.events = []

    def __call__(self, name, **fields):
        events.check(name, fields)
        self.events.append((name, fields))

    def named(self, name):
        return [fields for each, fields in self.events if each == name]

    @property
    def listed(self):
        """The events as they are written to a log."""
        return [{"event": name, **fields} for name, fields in self.events]
