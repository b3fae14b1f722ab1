"""Connection strings of PostgreSQL and passwords, read when relay connects, checked without being shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import BeforeValidator, SecretStr

from relay.config.secrets import known_text, read_secret_file, recent, refused, resolve_secret
from relay.faults import ConfigurationError, SecretUnavailable

_URI = ("postgresql://", "postgres://")
_MALFORMED = "is not a PostgreSQL connection string; write postgresql://user@host:5432/database"
_UNESCAPED = "is not a PostgreSQL connection string; in a URI, write %40 for an @ and %2F for a / in a password"


def check_dsn(value: str) -> str:
    """Return the connection string unchanged. Raises ValueError, whose text quotes nothing of it.

    libpq ends the password of a URI at the first @, and reads a URI with a / before it as one without a password. It
    takes the rest of the password for a host, port or database, which error messages name. This function rejects such
    strings.
    """
    if not value.strip():
        raise ValueError(f"is empty; {_MALFORMED.partition('; ')[2]}")
    try:
        fields = conninfo_to_dict(value)
    except ProgrammingError:
        # libpq's message quotes the string, which may hold a password.
        raise ValueError(_MALFORMED) from None
    if not _are_ports(str(fields.get("port") or "")) or _has_bare_at(value):
        raise ValueError(_UNESCAPED)
    return value


def _are_ports(text: str) -> bool:
    return all(port.isdecimal() or not port for port in text.replace(" ", "").split(","))


def _has_bare_at(value: str) -> bool:
    """Whether the host or the database of a URI has an @ that is not written as %40."""
    if not value.startswith(_URI):
        return False
    fields = conninfo_to_dict(value.replace("%40", "%01"))
    return any("@" in str(fields.get(name) or "") for name in ("host", "dbname"))


def administrator_dsn(dsn: str | None, file: Path | None, option: str) -> str | None:
    """An administrator's connection string, from an option (or its variable) or a file; None without either.

    Raises ConfigurationError, which names the option and quotes nothing of the string.
    """
    if dsn is not None and file is not None:
        raise ConfigurationError(f"{option}: is given twice, as a text and as a file: give one")
    try:
        text = read_secret_file(str(file)) if file is not None else dsn
        return None if text is None else check_dsn(text)
    except ValueError as error:
        name = option if file is None else f"{option}-file"
        raise ConfigurationError(f"{name}: {error}") from None


def _dsn(value: Any) -> Any:
    known = known_text(value) if isinstance(value, SecretStr) else value
    if isinstance(known, str):
        check_dsn(known)
    return value


Dsn = Annotated[SecretStr, BeforeValidator(_dsn), BeforeValidator(resolve_secret)]


def _checked(dsn: str) -> str:
    """The connection string. Raises SecretUnavailable for a text that is none."""
    try:
        return check_dsn(dsn)
    except ValueError as error:
        raise SecretUnavailable(f"the connection string {error}") from None


@dataclass(frozen=True, slots=True)
class DatabaseAccess:
    """How relay connects to a database: a connection string, and a password that completes it.

    Both may change, and are read for each connection. `key` is that of the connection string, for messages.
    """

    key: str
    dsn: SecretStr
    password: SecretStr | None = None

    def conninfo(self) -> str:
        """The connection string with its password, as it is now: only for connecting, never for a message.

        Raises SecretUnavailable if it cannot be read, or is none.
        """
        dsn = _checked(self.dsn.get_secret_value())
        if self.password is None:
            return dsn
        return make_conninfo(dsn, password=self.password.get_secret_value())

    def parameters(self) -> dict[str, Any]:
        """The parameters of the connection string, without the password. Raises SecretUnavailable."""
        parameters: dict[str, Any] = dict(conninfo_to_dict(_checked(recent(self.dsn))))
        parameters.pop("password", None)
        return parameters

    def leads_where(self, other: DatabaseAccess) -> bool:
        """Whether the other connection string leads to the same database, with the same role."""
        try:
            return self.dsn == other.dsn or self.parameters() == other.parameters()
        except SecretUnavailable:
            return False

    def refused(self) -> None:
        """Note that the server has refused the secrets of the last connection."""
        for secret in (self.dsn, self.password):
            if secret is not None:
                refused(secret)
