"""Takes and releases advisory locks, defines all their keys, and tells what sessions wait for a lock.

Every function raises psycopg.Error.

| key | database | held by |
|---|---|---|
| `INSTALLATION` | source, target | the session that installs or uninstalls the schema |
| `instance` | target | each instance of a group, shared; exclusively by a command that moves a stopped group |
| `configuration` | target | each instance of a group that runs with this configuration, shared |
| `retries` | target | the instance that retries what the group's target has deferred |
| `sink` | target | the instance that works a sink |
| `completions` | target | a database transaction that completes a delivery, shared; one that moves the sink |
| `chain` | target | the database transaction that changes the snapshots of a group |
| those of `relay.begin_messages` and `begin_times` | target | who puts messages into queues, shared, to its commit |
| `queues` | target | the database transaction that declares the queues of a group's configuration |
| `queue_fills` | target | the instance that fills queues of a group from the log |
| that of `relay.lock_streaks` in `sql/` | target | the database transaction that changes `relay.brakes` |
| `done` | target | the database transaction that removes done messages of a group's queues |
| `intake` | source | the instance that takes messages from a broker |
| `lock_events` | source | the database transaction that publishes events of others, which may come twice |
| `retention` | source | the instance that creates and drops partitions of the outbox |

Source: PostgreSQL documentation, "Advisory Locks".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg.rows import class_row, scalar_row

INSTALLATION = 0x72656C6179  # "relay"
"""A key of 64 bits; all others have two parts of 32 bits."""


class Key(NamedTuple):
    """The key of a lock: `space` is the kind of the object, `name` its name, which PostgreSQL hashes to 32 bits."""

    space: int
    name: str


def instance(group: str) -> Key:
    """The key of a running group."""
    return Key(0x72656C79, group)  # "rely"


def configuration(group: str, digest: str) -> Key:
    """The key of a configuration that a group runs with."""
    return Key(0x72656C63, f"{group} {digest}")  # "relc"


def retries(group: str) -> Key:
    """The key of the deferred transactions of a group's target."""
    return Key(0x72656C61, group)  # "rela"


def sink(group: str, name: str) -> Key:
    """The key of a sink of a group."""
    return Key(0x73696E6B, f"{group} {name}")  # "sink"


def completions(group: str, name: str) -> Key:
    """The key of the deliveries of a sink that a function completes in the target."""
    return Key(0x636F6D70, f"{group} {name}")  # "comp"


def chain(group: str) -> Key:
    """The key of the snapshots of a group."""
    return Key(0x63686169, group)  # "chai"


def queues(group: str) -> Key:
    """The key of the queues in the configuration of a group."""
    return Key(0x71756575, group)  # "queu"


def queue_fills(group: str) -> Key:
    """The key of the queues of a group that are filled from the log."""
    return Key(0x71756669, group)  # "qufi"


def done(group: str) -> Key:
    """The key of what an erasure removes from a group's target, such as done messages of queues."""
    return Key(0x646F6E65, group)  # "done"


def schedules(group: str) -> Key:
    """The key of the schedules in the configuration of a group."""
    return Key(0x73636865, group)  # "sche"


def intake(group: str, name: str) -> Key:
    """The key of the intake of a broker's messages."""
    return Key(0x696E7461, f"{group} {name}")  # "inta"


_EVENTS = 0x6576656E  # "even"


def lock_events(conn: psycopg.Connection[Any], ids: Sequence[str]) -> None:
    """Let no other session publish events of these ids until the transaction ends: its statements see theirs."""
    conn.execute(
        """
        select count(pg_advisory_xact_lock(%s, key))
          from (select distinct hashtext(id) as key from unnest(%s::text[]) as id order by key) as sorted
        """,
        (_EVENTS, list(ids)),
    )


def retention(table: str) -> Key:
    """The key of the partitions of an outbox."""
    return Key(0x72657461, table)  # "reta"


def try_lock(conn: psycopg.Connection[Any], key: Key) -> bool:
    """Take the lock until the session ends, or `unlock`; returns False while another session holds it."""
    return _boolean(conn, "select pg_try_advisory_lock(%s, hashtext(%s))", key)


def try_lock_each(conn: psycopg.Connection[Any], keys: Sequence[Key]) -> list[bool]:
    """Take several locks as `try_lock` does, in one statement; returns whether each was taken."""
    rows = conn.execute(
        """
        select pg_try_advisory_lock(space, hashtext(name))
          from unnest(%s::int[], %s::text[]) with ordinality as key (space, name, number) order by number
        """,
        ([key.space for key in keys], [key.name for key in keys]),
    )
    return [taken for (taken,) in rows]


def try_lock_shared(conn: psycopg.Connection[Any], key: Key) -> bool:
    """Share the lock until the session ends; returns False while another session holds it exclusively."""
    return _boolean(conn, "select pg_try_advisory_lock_shared(%s, hashtext(%s))", key)


def lock_shared(conn: psycopg.Connection[Any], key: Key) -> None:
    """Wait for the lock and share it until the session ends."""
    conn.execute("select pg_advisory_lock_shared(%s, hashtext(%s))", key)


def unlock(conn: psycopg.Connection[Any], key: Key) -> None:
    """Release a lock that `try_lock` took."""
    conn.execute("select pg_advisory_unlock(%s, hashtext(%s))", key)


def try_lock_in_transaction(conn: psycopg.Connection[Any], key: Key) -> bool:
    """Take the lock until the database transaction ends; returns False while another session holds it."""
    return _boolean(conn, "select pg_try_advisory_xact_lock(%s, hashtext(%s))", key)


def lock_in_transaction(conn: psycopg.Connection[Any], key: Key) -> None:
    """Wait for the lock, and hold it until the database transaction ends."""
    conn.execute("select pg_advisory_xact_lock(%s, hashtext(%s))", key)


def sharing(conn: psycopg.Connection[Any], key: Key) -> list[str]:
    """List the application names of the sessions that share the lock, the oldest session first."""
    rows = conn.execute(
        """
        select coalesce(a.application_name, '') from pg_locks l join pg_stat_activity a on a.pid = l.pid
         where l.locktype = 'advisory' and l.granted and l.mode = 'ShareLock'
           and l.database = (select oid from pg_database where datname = current_database())
           and l.classid::bigint = %s and l.objid::bigint = hashtext(%s)::bigint & 4294967295 and l.objsubid = 2
         order by a.backend_start
        """,
        key,
    )
    return [name for (name,) in rows]


def holder(conn: psycopg.Connection[Any], key: Key) -> str | None:
    """Describe the session that holds the lock exclusively; None if no session does."""
    row = conn.execute(
        """
        select format('process %%s of the server, %%s%%s, since %%s', a.pid,
                      coalesce(nullif(a.application_name, ''), 'without application_name'),
                      ' from ' || a.client_addr, to_char(a.backend_start, 'YYYY-MM-DD HH24:MI:SSOF'))
          from pg_locks l join pg_stat_activity a on a.pid = l.pid
         where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock'
           and l.database = (select oid from pg_database where datname = current_database())
           and l.classid::bigint = %s and l.objid::bigint = hashtext(%s)::bigint & 4294967295 and l.objsubid = 2
        """,
        key,
    ).fetchone()
    return str(row[0]) if row else None


def _boolean(conn: psycopg.Connection[Any], statement: LiteralString, key: Key) -> bool:
    with conn.cursor(row_factory=scalar_row) as cursor:
        return bool(cursor.execute(statement, key).fetchone())


@dataclass(frozen=True, slots=True)
class Wait:
    """A session of relay that waits for a lock: for how many seconds, for which, and which sessions hold it."""

    pid: int
    seconds: float
    waits_for: str
    blocked_by: str | None

    def __str__(self) -> str:
        """The wait in words."""
        by = f", held by {self.blocked_by}" if self.blocked_by else ""
        return f"session {self.pid} for {self.seconds:.0f} s for a lock ({self.waits_for}){by}"


def lock_waits(conn: psycopg.Connection[Any]) -> list[Wait]:
    """List relay's sessions that wait for a lock of the database, the longest wait first.

    Advisory locks are left out: an instance that stands by waits for them.
    """
    with conn.cursor(row_factory=class_row(Wait)) as cursor:
        return cursor.execute(
            """
            select a.pid, extract(epoch from clock_timestamp() - a.query_start)::float8 as seconds,
                   a.wait_event || coalesce(' on ' || (
                       select l.relation::regclass::text from pg_locks as l
                        where l.pid = a.pid and not l.granted and l.relation is not null limit 1), '') as waits_for,
                   (select string_agg(b.pid || ' (' || coalesce(nullif(b.application_name, ''), b.usename) || ')', ', ')
                      from pg_stat_activity as b where b.pid = any (pg_blocking_pids(a.pid))) as blocked_by
              from pg_stat_activity as a
             where a.datname = current_database() and a.application_name like 'relay%' and a.wait_event_type = 'Lock'
               and a.wait_event <> 'advisory' and a.pid <> pg_backend_pid()
             order by 2 desc
            """
        ).fetchall()
