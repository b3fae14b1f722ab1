"""For Alembic: `include_name` and `include_object` in env.py, `op.create_outbox()` in a migration."""

from __future__ import annotations

from collections.abc import Mapping

from alembic.operations import MigrateOperation, Operations
from sqlalchemy import Column, Connection, Index
from sqlalchemy.schema import SchemaItem
from sqlalchemy.util import await_only

from relay.client import schema

_TABLE = "outbox_message_t"
_ADDED = frozenset({"c_xid", "c_offset", "c_ts"})
"""Columns that relay adds to a table of yours; c_ts with its partitions."""


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Return whether autogenerate compares an object: not relay's outbox, its partitions, or relay's schema.

    For `context.configure(include_name=…)`: no MetaData has them, so that autogenerate would drop them.
    """
    if type_ == "schema":
        return name != "relay"
    if type_ != "table" or name is None:
        return True
    schema_name = parent_names.get("schema_name") or "public"
    return not (schema_name == "public" and (name == _TABLE or name.startswith(f"{_TABLE}_")))


def include_object(
    item: SchemaItem, name: str | None, type_: str, reflected: bool, compare_to: SchemaItem | None
) -> bool:
    """Return whether autogenerate compares an object: not what `relay init` adds to a table of yours.

    For `context.configure(include_object=…)`, where your MetaData has the outbox: autogenerate would drop `c_xid`,
    `c_offset`, and relay's indexes on them.
    """
    if not reflected or compare_to is not None:
        return True
    if isinstance(item, Column):
        return item.name not in _ADDED
    return not (isinstance(item, Index) and _is_relays(item))


def _is_relays(index: Index) -> bool:
    return [each.name for each in index.columns] == ["c_xid"] or (index.name or "").endswith(
        "_relay_c_offset"
    )


@Operations.register_operation("create_outbox")
class CreateOutbox(MigrateOperation):
    """Installs relay's own outbox."""

    @classmethod
    def create_outbox(cls, operations: Operations) -> None:
        """Install relay's own outbox in the migration's transaction."""
        operations.invoke(cls())

    def reverse(self) -> DropOutbox:
        """Return the operation that undoes this one."""
        return DropOutbox()


@Operations.register_operation("drop_outbox")
class DropOutbox(MigrateOperation):
    """Drops relay's own outbox and its events."""

    @classmethod
    def drop_outbox(cls, operations: Operations) -> None:
        """Drop relay's own outbox and its events in the migration's transaction."""
        operations.invoke(cls())

    def reverse(self) -> CreateOutbox:
        """Return the operation that undoes this one."""
        return CreateOutbox()


@Operations.implementation_for(CreateOutbox)
def _create(operations: Operations, _: CreateOutbox) -> None:
    for script in schema.install():
        _run(operations, script)


@Operations.implementation_for(DropOutbox)
def _drop(operations: Operations, _: DropOutbox) -> None:
    _run(operations, schema.remove())


def _run(operations: Operations, script: str) -> None:
    context = operations.get_context()
    if context.as_sql:
        # `alembic upgrade --sql` writes the migration as a script.
        context.impl.static_output(script)
        return
    conn: Connection = operations.get_bind()
    if conn.dialect.driver == "asyncpg":
        # SQLAlchemy's adapter prepares a statement, and a script of several cannot be prepared.
        await_only(conn.connection.driver_connection.execute(script))  # type: ignore[union-attr]
        return
    conn.execution_options(no_parameters=True).exec_driver_sql(script)
