"""What runs beside the accelerator hosts, in colocated Python, and its handle."""

from sidecar.remote_iterator import RemoteIterator as RemoteIterator
