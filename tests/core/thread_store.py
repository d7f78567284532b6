"""A store of keys and values for the threads of one process."""

import collections
import threading


class Store:
    """Keys and values; counts requests by thread; nobody waits for the key `lost`."""

    def __init__(self, lost=""):
        self.values, self._lost = {}, lost
        self.requests = collections.Counter()
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self._changed:
            self.requests[threading.get_ident()] += 1
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            self.requests[threading.get_ident()] += 1
            secs = 0 if key == self._lost else timeout_in_ms / 1000
            if not self._changed.wait_for(lambda: key in self.values, secs):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self._changed:
            self.requests[threading.get_ident()] += 1
            for each in [each for each in self.values if each.startswith(key)]:
                del self.values[each]
