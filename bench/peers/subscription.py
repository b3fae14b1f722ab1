"""PostgreSQL's own subscription, into a second database of the same server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from bench.outbox import PUBLICATION, Backlog, Outbox, wait_until

COLUMNS = """
    select string_agg(format('%%I %%s', attname, format_type(atttypid, atttypmod)), ', ' order by attnum)
      from pg_attribute where attrelid = 'outbox_message_t'::regclass and attnum > 0 and not attisdropped
"""
FAILS = "select apply_error_count from pg_stat_subscription_stats where subname = %s"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription with this `synchronous_commit`; the row itself is the effect."""

    synchronous_commit: str

    @property
    def name(self) -> str:
        return f"subscription, synchronous_commit {self.synchronous_commit}"

    def unavailable(self) -> str | None:
        return None

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        with outbox.copy(backlog) as slot, self._target(outbox) as conn:
            conn.execute("truncate outbox_message_t")
            conn.execute(
                sql.SQL(
                    "create subscription {name} connection {dsn} publication {publication} with (create_slot = false,"
                    " slot_name = {name}, copy_data = false, enabled = false, synchronous_commit = {commit})"
                ).format(
                    name=sql.Identifier(slot),
                    dsn=sql.Literal(outbox.dsn),
                    publication=sql.Identifier(PUBLICATION),
                    commit=sql.Literal(self.synchronous_commit),
                )
            )
            name = sql.Identifier(slot)
            try:
                conn.execute(sql.SQL("alter subscription {} enable").format(name))
                started = wait_until(
                    lambda: self._streams(conn, outbox, slot), f"{slot} active", 120
                )
                finished = self._applied(conn, outbox, slot, backlog)
            finally:
                conn.execute(sql.SQL("alter subscription {} disable").format(name))
                conn.execute(sql.SQL("alter subscription {} set (slot_name = none)").format(name))
                conn.execute(sql.SQL("drop subscription {}").format(name))
            rows = conn.execute("select count(*) from outbox_message_t").fetchone()
            if rows != (backlog.events,):
                raise AssertionError(f"the subscription applied {rows} of {backlog.events} rows")
            return backlog.events / (finished - started)

    def _target(self, outbox: Outbox) -> psycopg.Connection[Any]:
        name = f"{outbox.name}_copy"
        if not outbox.value("select count(*) from pg_database where datname = %s", name):
            outbox.conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        dsn = make_conninfo(outbox.dsn, dbname=name)
        conn: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        # The outbox's columns, whatever its edition; without an index, like the table for relay's effects.
        columns = outbox.value(COLUMNS)
        conn.execute(f"create table if not exists outbox_message_t ({columns})".encode())
        return conn

    def _streams(self, conn: psycopg.Connection[Any], outbox: Outbox, slot: str) -> bool:
        """Whether the slot is read. Raises RuntimeError if the subscription cannot apply what it receives."""
        fails = conn.execute(FAILS, (slot,)).fetchone()
        if fails and fails[0]:
            raise RuntimeError("the subscription cannot apply the rows: the server's log says why")
        return outbox.reader(slot) is not None

    def _applied(
        self, conn: psycopg.Connection[Any], outbox: Outbox, slot: str, backlog: Backlog
    ) -> float:
        """The monotonic clock when the last commit is applied; the slot's position covers an end between commits."""
        oid = conn.execute("select oid from pg_subscription where subname = %s", (slot,)).fetchone()
        query = """
            select greatest(
                (select remote_lsn from pg_show_replication_origin_status() where external_id = %s),
                (select confirmed_flush_lsn from pg_replication_slots where slot_name = %s)) >= %s::pg_lsn
        """
        origin = f"pg_{oid[0]}" if oid else ""
        return wait_until(
            lambda: bool(outbox.value(query, origin, slot, backlog.end)), f"{slot} applied"
        )
