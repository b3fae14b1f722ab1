"""Builds the TLS contexts of sinks, which verify the server and present a client certificate."""

from __future__ import annotations

import ssl

from relay.config.handlers import TlsSettings
from relay.faults import ConfigurationError


def verification(name: str, tls: TlsSettings) -> ssl.SSLContext:
    """The TLS context of a handler's configuration. Raises ConfigurationError if a certificate cannot be used."""
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if not tls.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:
        raise ConfigurationError(
            f"handlers.{name}.tls: {_files(tls)}: a certificate cannot be used: {error.strerror or error}: give the "
            "files of a CA, or of a certificate and its key, in PEM"
        ) from None
    return context


def _files(tls: TlsSettings) -> str:
    given = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    return ", ".join(f"{key} {path}" for key, path in given.items() if path is not None)
