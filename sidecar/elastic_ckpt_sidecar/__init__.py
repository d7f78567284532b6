"""Code that runs in colocated Python on accelerator hosts, and the head's handles."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt_sidecar.remote_iterator import RemoteIterator

__all__ = ["RemoteIterator"]
