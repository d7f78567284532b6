"""Code that runs beside the accelerator hosts, in colocated Python, and its handle."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt_sidecar.remote_iterator import RemoteIterator

__all__ = ["RemoteIterator"]
