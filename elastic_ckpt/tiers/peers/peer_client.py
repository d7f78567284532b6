"""The client of a process for all peers: one secret, certificates, limits."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import bandwidth, peer_endpoint


class PeerClient:
    """Reads from the agents of other machines; one a process, for any thread.

    Args:
      secret: the run's, or a function that returns the current one.
      tls_ca: a PEM file with the authority that signs the agents' certificates; with
        it, agents without TLS are refused. Without it, the system's authorities.
      timeout_secs: a peer that sends nothing for so long, or far too little, fails,
        and is left alone for three times as long. Where nobody else has what it has,
        it is waited for as long.
      max_connections: to one peer at a time.
      max_bytes_per_sec: from all peers together; None without a bound.

    Raises:
      ConfigError: if `tls_ca` cannot be read.
    """

    def __init__(
        self,
        secret: str | Callable[[], str],
        *,
        tls_ca: epath.PathLike | None = None,
        timeout_secs: float = 10.0,
        max_connections: int = 4,
        max_bytes_per_sec: float | None = None,
    ) -> None:
        bound = bandwidth.Bandwidth(max_bytes_per_sec) if max_bytes_per_sec else None
        self._terms = peer_endpoint.Terms(
            secret=(lambda: secret) if isinstance(secret, str) else secret,
            needs_tls=tls_ca is not None,
            timeout_secs=timeout_secs,
            max_connections=max_connections,
            bandwidth_bound=bound,
        )
        self._ca = tls_ca
        # By whether a certificate's name matters.
        self._contexts: dict[bool, ssl.SSLContext] = {}
        if tls_ca is not None:
            self._context(check_hostname=True)
        self._endpoints: dict[tuple[str, str | None], peer_endpoint.Endpoint] = {}

    def endpoint(
        self, url: str, *, certificate_sha256: str | None = None
    ) -> peer_endpoint.Endpoint:
        """The agent at `url`, one object however often it is asked for.

        Args:
          url: of an agent.
          certificate_sha256: that the agent announced: no other is then taken, and the
            name in it does not matter.
        """
        made = peer_endpoint.Endpoint(
            url,
            self._terms,
            tls=self._context(check_hostname=certificate_sha256 is None)
            if url.startswith("https://")
            else None,
            certificate_sha256=certificate_sha256,
        )
        return self._endpoints.setdefault((url, certificate_sha256), made)

    def left_skipped_secs(self) -> float:
        """How long until all peers that have failed are asked again."""
        endpoints = list(self._endpoints.values())
        return max((each.left_skipped_secs() for each in endpoints), default=0.0)

    def close(self) -> None:
        """Closes all idle connections."""
        for endpoint in list(self._endpoints.values()):
            endpoint.close()

    def _context(self, *, check_hostname: bool) -> ssl.SSLContext:
        # Made once: to read the system's authorities takes longer than a request.
        if check_hostname not in self._contexts:
            try:
                made = ssl.create_default_context(cafile=self._ca)
            except OSError as error:
                raise errors.ConfigError(
                    f"the certificates of peers cannot be verified with {self._ca}"
                    f" ({error}); give a PEM file with that of their authority"
                ) from None
            made.check_hostname = check_hostname
            self._contexts[check_hostname] = made
        return self._contexts[check_hostname]
