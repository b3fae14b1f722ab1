"""Operations for Alembic: `import relay.client.alembic` in env.py, `op.create_outbox()` in a migration."""

from __future__ import annotations

from alembic.operations import MigrateOperation, Operations
from sqlalchemy import Connection
from sqlalchemy.util import await_only

from relay.client import schema


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
        _run(operations.get_bind(), script)


@Operations.implementation_for(DropOutbox)
def _drop(operations: Operations, _: DropOutbox) -> None:
    _run(operations.get_bind(), schema.remove())


def _run(conn: Connection, script: str) -> None:
    if conn.dialect.driver == "asyncpg":
        # SQLAlchemy's adapter prepares a statement, and a script of several cannot be prepared.
        await_only(conn.connection.driver_connection.execute(script))  # type: ignore[union-attr]
        return
    conn.execution_options(no_parameters=True).exec_driver_sql(script)
