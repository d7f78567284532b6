"""Components of a run, and validation of what its replicas should have in common."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.components.validation import Finding, validate

__all__ = ["Finding", "validate"]
