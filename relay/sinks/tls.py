"""TLS contexts for connections to destinations and brokers, and whether a handshake has failed over a certificate.

A context reads its files once, and certificates of days or hours are renewed in place, or behind a symbolic link.

Source: OpenSSL, SSL_CTX_use_certificate_chain_file(3).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Hashable

from relay.config.handlers import TlsSettings
from relay.config.secrets import file_mark
from relay.faults import ConfigurationError

log = logging.getLogger(__name__)


class Certificates:
    """The TLS context of a handler, built again when one of its files has changed."""

    def __init__(
        self,
        name: str,
        tls: TlsSettings,
        prepare: Callable[[ssl.SSLContext], None] | None = None,
        section: str = "handlers",
    ) -> None:
        """`prepare` is called with each new context. Raises ConfigurationError if a certificate cannot be used."""
        self._name = name
        self._key = f"{section}.{name}.tls"
        self._tls = tls
        self._prepare = prepare
        self._marks = self._refused = self._marks_now()
        self._context = self._built()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection: the former one while the files cannot be used."""
        marks = self._marks_now()
        if marks not in (self._marks, self._refused):
            try:
                self._context, self._marks = self._built(), marks
            except ConfigurationError as error:
                # A certificate is written before its key, or after it.
                self._refused = marks
                log.warning(
                    "a certificate has changed and cannot be used yet; the former one stays in use",
                    extra={"handler": self._name, "fault": str(error)},
                )
        return self._context

    def refused(self) -> None:
        """Build the next context again, since the server has refused a connection with this one."""
        self._marks = self._refused = None

    def _marks_now(self) -> Hashable:
        files = (self._tls.ca_file, self._tls.cert_file, self._tls.key_file)
        return tuple(file_mark(each) for each in files if each is not None)

    def _built(self) -> ssl.SSLContext:
        tls = self._tls
        try:
            context = ssl.create_default_context(cafile=tls.ca_file)
            if not tls.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if tls.cert_file is not None:
                context.load_cert_chain(tls.cert_file, tls.key_file)
        except OSError as error:
            raise ConfigurationError(
                f"{self._key}: {_files(tls)}: a certificate cannot be used: {error.strerror or error}: "
                "give the files of a CA, or of a certificate and its key, in PEM"
            ) from None
        if self._prepare is not None:
            self._prepare(context)
        return context


def _files(tls: TlsSettings) -> str:
    given = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    return ", ".join(f"{key} {path}" for key, path in given.items() if path is not None)


def is_refusal(error: BaseException) -> bool:
    """Whether a TLS handshake has failed over a certificate: this server's, or the one that relay presents."""
    named = (getattr(error, name, None) for name in ("os_error", "certificate_error"))
    causes = (error, error.__cause__, error.__context__, *named)
    return any(
        isinstance(each, ssl.SSLCertVerificationError)
        or (isinstance(each, ssl.SSLError) and "ALERT" in (getattr(each, "reason", None) or ""))
        for each in causes
    )
