"""The right to publish into an outbox: relay's own, and that of handlers in the target, most often the source too."""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import sql

from relay.admin.findings import Finding, Severity, finding_of
from relay.config.handlers import SqlHandler, TransactionalHandler
from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX, SourceSettings
from relay.faults import ConfigurationError
from relay.model.events import FIELDS
from relay.store.connections import Connection, database_identity

_FUNCTION = "relay.publish(uuid, uuid, jsonb, uuid)"
_COLUMNS = tuple(name for name in FIELDS if name != "c_offset")
"""What a publisher may insert into relay's own outbox."""


def set_right(source: Connection, of: SourceSettings, wanted: bool) -> bool:
    """Grant the role relay the right to publish, or revoke it; returns whether that changed anything.

    It is the right of `relay_publisher`, without that role's other ones. Messages need none. Raises psycopg.Error.
    """
    if of.message_prefix is not None or set(_may(source, of.table, "relay")) == {wanted}:
        return False
    verb, to = (sql.SQL("grant"), sql.SQL("to")) if wanted else (sql.SQL("revoke"), sql.SQL("from"))
    columns = sql.SQL(" ({})").format(sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)))
    source.execute(
        sql.SQL("{} insert{} on {} {} relay").format(
            *(verb, columns if of.owns_table else sql.SQL("")),
            *(sql.Identifier(*of.table_name), to),
        )
    )
    if of.owns_table:
        source.execute(
            sql.SQL("{} execute on function {} {} relay").format(verb, sql.SQL(_FUNCTION), to)
        )
    return True


def _may(conn: Connection, table: str, role: str) -> list[bool]:
    """Return whether a role may insert into an outbox and, if it is relay's own, whether it may call `relay.publish`.

    What does not exist may not be used. Raises psycopg.Error.
    """
    name = sql.Identifier(*table.split(".")).as_string(conn)
    (row,) = conn.execute(
        "select coalesce(has_any_column_privilege(%s, to_regclass(%s), 'insert'), false),"
        "       coalesce(has_function_privilege(%s, to_regprocedure(%s), 'execute'), false)",
        (role, name, role, _FUNCTION),
    )
    return list(row) if table == OWN_OUTBOX else [row[0]]


def require(source: Connection, key: str) -> None:
    """Raise ConfigurationError unless the session may call `relay.publish`, as the configuration key needs it."""
    if not _may(source, OWN_OUTBOX, source.info.user)[-1]:
        raise ConfigurationError(
            f"{key}: the role {source.info.user} may not publish: run `relay init --handlers-publish`, and connect as "
            "a member of relay"
        )


def check(source: Connection | None, target: Connection, settings: Settings) -> Iterator[Finding]:
    """Check handlers that publish. `source` is None if it cannot be reached."""
    here = settings.one_database
    if source is not None:
        here = database_identity(source) == database_identity(target)
    publishing = [
        (name, each)
        for name, each in settings.handlers.items()
        if isinstance(each, TransactionalHandler) and each.publishes
    ]
    for name, handler in publishing:
        table = settings.source.table if here else OWN_OUTBOX
        # Messages need no right, and which outbox of another database a function writes to is not known.
        if isinstance(handler, SqlHandler) or here:
            if here and settings.source.message_prefix is not None:
                continue
            yield finding_of(
                *("handler", f"{name} may publish", _require),
                *(target, table, name, isinstance(handler, SqlHandler)),
            )
    if publishing and here and not settings.source.mapping["metadata"]:
        yield Finding(
            Severity.WARNING,
            "handler",
            "source.columns.metadata: handlers publish, and the outbox has no such column, so that an event that "
            "causes itself is not seen: add one",
        )


def _require(target: Connection, table: str, name: str, calls: bool) -> None:
    """Raise ConfigurationError unless a handler may publish. `calls`: by `relay.publish`, where that is there."""
    rights = _may(target, table, target.info.user)
    if not (rights[-1] if calls else any(rights)):
        raise ConfigurationError(
            f"handlers.{name}.publishes: the role {target.info.user} may not publish into {table} of the database "
            f"{target.info.dbname!r}: run `relay init --handlers-publish` with it as the source, and connect as a "
            "member of relay"
        )
