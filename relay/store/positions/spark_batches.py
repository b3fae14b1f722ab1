"""Stores the batches that Spark writes for sinks: `relay.spark_batches`, a row for each sink and destination.

If the sink gets another destination, an open batch stays until the next batch of the sink ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from relay.model.events import Lsn
from relay.model.snapshots import Snapshot
from relay.store import literals
from relay.store.connections import Connection
from relay.store.positions.sinks import BEFORE_FIRST


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a batch: rows of a difference, and transactions that were deferred for the sink.

    Left out are transactions of the difference whose greatest c_offset is at most `polled_offset`, and those of
    `left_out` (full xids): the sink has them already, or they are deferred for it when the batch ends. `rows` counts
    the rows of the difference. No transaction of the batch ends after `lsn`. `data` are the events of the rows
    `deferred` (ids) of relay.deferred, as an Arrow stream. A destination that has the batch has every event that was
    committed before `complete_before`; None where no such time is known.
    """

    before: Snapshot
    after: Snapshot
    polled_offset: int = BEFORE_FIRST
    left_out: Sequence[int] = ()
    lsn: Lsn = Lsn(0)  # noqa: RUF009
    rows: int = 0
    deferred: Sequence[int] = ()
    data: bytes | None = None
    complete_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that is stored and not finished. It has the same rows and layout each time it is written.

    `application` and `number` identify it at its destination, and so does `id` alone. `files` are the staged files that
    are the batch's for good; None until an attempt has stored its own.
    """

    application: str
    number: int
    id: str
    epoch: int
    partition_by: list[str]
    host_buckets: int
    contents: Contents
    files: list[str] | None = None


def begun(conn: Connection, group: str, sink: str, target: str) -> OpenBatch | None:
    """Read the open batch of a sink for a destination; None if there is none. Raises psycopg.Error."""
    row = conn.execute(
        """
        select application::text, number, batch::text, epoch, partition_by, host_buckets,
               before::text, after::text, polled_offset, left_out::text[]::bigint[], delivered_lsn::text, rows_read,
               deferred, data, complete_before, files
          from relay.spark_batches where (group_id, sink, target) = (%s, %s, %s) and batch is not null
        """,
        (group, sink, target),
    ).fetchone()
    if row is None:
        return None
    application, number, identifier, epoch, partition_by, host_buckets = row[:6]
    before, after, polled, left_out, lsn, rows, deferred, data, complete_before, files = row[6:]
    contents = Contents(
        Snapshot.parse(before),
        Snapshot.parse(after),
        polled,
        left_out,
        Lsn.parse(lsn),
        rows,
        deferred,
        data,
        complete_before,
    )
    return OpenBatch(
        application, number, identifier, epoch, partition_by, host_buckets, contents, files
    )


def begin(
    conn: Connection,
    group: str,
    sink: str,
    target: str,
    epoch: int,
    layout: tuple[Sequence[str], int],
    contents: Contents,
) -> None:
    """Store the next batch of a sink; `layout` is (partition_by, host_buckets). Raises psycopg.Error.

    Numbers continue from the destination's last batch, unless the server is another one, has another timeline or was
    restarted since, the database or the table is another one, or the table was emptied (it has another file): it may
    have been restored from a backup, where later numbers stand for other rows. The timeline is read from the name of
    the WAL file: after a promotion, pg_control_checkpoint() shows the former one for minutes.
    """
    conn.execute(
        """
        insert into relay.spark_batches as b (group_id, sink, target, server, epoch, before, after, polled_offset,
                                              left_out, delivered_lsn, rows_read, partition_by, host_buckets, deferred,
                                              data, complete_before)
        select %(group)s, %(sink)s, %(target)s,
               concat_ws(' ', s.system_identifier, left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
                         extract(epoch from pg_postmaster_start_time()), d.oid,
                         pg_relation_filenode('relay.spark_batches')),
               %(epoch)s,
               %(before)s::pg_snapshot, %(after)s::pg_snapshot, %(polled)s, %(left_out)s::xid8[], %(lsn)s::pg_lsn,
               %(rows)s, %(partition_by)s, %(host_buckets)s, %(deferred)s::bigint[], %(data)s,
               %(complete_before)s
          from pg_control_system() as s, pg_database as d where d.datname = current_database()
        on conflict (group_id, sink, target) do update
           set application = case when b.server = excluded.server then b.application else excluded.application end,
               number = 1 + case when b.server = excluded.server then b.number else 0 end,
               server = excluded.server, batch = excluded.batch, epoch = excluded.epoch,
               before = excluded.before, after = excluded.after, polled_offset = excluded.polled_offset,
               left_out = excluded.left_out, delivered_lsn = excluded.delivered_lsn, rows_read = excluded.rows_read,
               partition_by = excluded.partition_by, host_buckets = excluded.host_buckets,
               deferred = excluded.deferred, data = excluded.data,
               complete_before = excluded.complete_before, files = null, begun_at = excluded.begun_at
        """,
        {
            "group": group,
            "sink": sink,
            "target": target,
            "epoch": epoch,
            "before": str(contents.before),
            "after": str(contents.after),
            "polled": contents.polled_offset,
            "left_out": literals.of_numbers(contents.left_out),
            "lsn": str(contents.lsn),
            "rows": contents.rows,
            "partition_by": list(layout[0]),
            "host_buckets": layout[1],
            "deferred": literals.of_numbers(contents.deferred),
            "data": contents.data,
            "complete_before": contents.complete_before,
        },
    )


def lay_out(
    conn: Connection, group: str, sink: str, batch: str, partition_by: Sequence[str]
) -> None:
    """Set the partitioning of a batch before any of it is written. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.spark_batches set partition_by = %s where group_id = %s and sink = %s and batch = %s::uuid
        """,
        (list(partition_by), group, sink, batch),
    )


def decide(
    conn: Connection, group: str, sink: str, batch: str, files: Sequence[str]
) -> list[str] | None:
    """Store the staged files of an attempt as those of the batch, unless another attempt's are stored already.

    Returns the files of the batch, which never change; None where the batch was ended, or the sink moved, meanwhile.
    `conn` is the session that has the sink's claim, so that no worker decides after it has lost it. Raises
    psycopg.Error: then the files may be stored.
    """
    row = conn.execute(
        """
        update relay.spark_batches as b set files = coalesce(b.files, %s::text[]) from relay.sinks as s
         where (s.group_id, s.sink, s.epoch) = (b.group_id, b.sink, b.epoch)
           and b.group_id = %s and b.sink = %s and b.batch = %s::uuid
        returning b.files
        """,
        (list(files), group, sink, batch),
    ).fetchone()
    return None if row is None else row[0]


def end(conn: Connection, group: str, sink: str, batch: str) -> bool:
    """End a batch that is written or given up, and the sink's batches for other destinations.

    Returns whether it was still open. Raises psycopg.Error.
    """
    ended = conn.execute(
        """
        update relay.spark_batches as b set batch = null, data = null, files = null from relay.spark_batches as former
         where (b.group_id, b.sink, b.target) = (former.group_id, former.sink, former.target)
           and b.group_id = %s and b.sink = %s and b.batch is not null
        returning former.batch::text
        """,
        (group, sink),
    ).fetchall()
    return (batch,) in ended


def dead_transactions(conn: Connection, deferred: Sequence[int]) -> list[int]:
    """List the dead transactions that rows of relay.deferred, by id, replay. Raises psycopg.Error."""
    rows = conn.execute(
        "select dead_transaction from relay.deferred where id = any(%s::bigint[]) and dead_transaction is not null",
        (literals.of_numbers(deferred),),
        prepare=False,
    )
    return [number for (number,) in rows]


def hashes(conn: Connection, hosts: Sequence[str]) -> dict[str, int]:
    """Return the hash of each host_id, which decides its bucket. Raises psycopg.Error."""
    return dict(
        conn.execute(
            "select host, abs(hashtext(host)::bigint) from unnest(%s::text[]) as host",
            (literals.of_texts(hosts),),
        ).fetchall()
    )
