"""Stores the batches that Spark writes for sinks: `relay.spark_batches`, a row for each sink and destination.

If the sink gets another destination, an open batch stays until the next batch of the sink ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

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


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The batch that a sink finished last, and what tells that its destination still has it.

    `kind` names the writer that knows the `facts`. Both are None for a batch that was finished by an edition of relay
    that did not note them.
    """

    application: str
    number: int
    id: str = ""
    kind: str | None = None
    facts: Mapping[str, Any] | None = None


def last(conn: Connection, group: str, sink: str, epoch: int) -> LastBatch | None:
    """Read the last finished batch of a sink since it began, or was moved; None if there is none. Raises psycopg.Error.

    It may have been written to another destination than the present one. A batch that is open in a row of an edition
    that did not note the last one tells nothing of the one before.
    """
    row = conn.execute(
        """
        select application::text, number, last_batch from relay.spark_batches
         where group_id = %(group)s and sink = %(sink)s
           and (last_epoch = %(epoch)s or last_epoch is null and epoch = %(epoch)s and batch is null)
         order by last_epoch nulls last, begun_at desc limit 1
        """,
        {"group": group, "sink": sink, "epoch": epoch},
    ).fetchone()
    if row is None:
        return None
    application, number, noted = row
    return LastBatch(application, number) if noted is None else LastBatch(**noted)


def adopt(conn: Connection, group: str, sink: str, epoch: int, batch: LastBatch) -> None:
    """Note what tells that a last batch is there that an earlier edition has finished. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.spark_batches set last_epoch = epoch, last_batch = %s
         where group_id = %s and sink = %s and epoch = %s and last_epoch is null and batch is null
           and (application, number) = (%s::uuid, %s)
        """,
        (Jsonb(asdict(batch)), group, sink, epoch, batch.application, batch.number),
    )


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
                                              data, complete_before, last_epoch)
        select %(group)s, %(sink)s, %(target)s,
               concat_ws(' ', s.system_identifier, left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
                         extract(epoch from pg_postmaster_start_time()), d.oid,
                         pg_relation_filenode('relay.spark_batches')),
               %(epoch)s,
               %(before)s::pg_snapshot, %(after)s::pg_snapshot, %(polled)s, %(left_out)s::xid8[], %(lsn)s::pg_lsn,
               %(rows)s, %(partition_by)s, %(host_buckets)s, %(deferred)s::bigint[], %(data)s,
               %(complete_before)s, -1
          from pg_control_system() as s, pg_database as d where d.datname = current_database()
        on conflict (group_id, sink, target) do update
           set application = case when b.server = excluded.server then b.application else excluded.application end,
               number = 1 + case when b.server = excluded.server then b.number else 0 end,
               server = excluded.server, batch = excluded.batch, epoch = excluded.epoch,
               before = excluded.before, after = excluded.after, polled_offset = excluded.polled_offset,
               left_out = excluded.left_out, delivered_lsn = excluded.delivered_lsn, rows_read = excluded.rows_read,
               partition_by = excluded.partition_by, host_buckets = excluded.host_buckets,
               deferred = excluded.deferred, data = excluded.data,
               complete_before = excluded.complete_before, files = null, begun_at = excluded.begun_at,
               last_epoch = coalesce(b.last_epoch, excluded.last_epoch)
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
        update relay.spark_batches as b set files = coalesce(b.files, %s::text[]) from relay.sink_claims as s
         where (s.group_id, s.sink, s.epoch) = (b.group_id, b.sink, b.epoch)
           and b.group_id = %s and b.sink = %s and b.batch = %s::uuid
        returning b.files
        """,
        (list(files), group, sink, batch),
    ).fetchone()
    return None if row is None else row[0]


def end(
    conn: Connection, group: str, sink: str, batch: str, written: LastBatch | None = None
) -> bool:
    """End a batch that is `written` or given up, and the sink's batches for other destinations.

    The last batch is the one before as long as nothing tells that this one is there: its `facts` are None. Returns
    whether it was still open. Raises psycopg.Error.
    """
    noted = None if written is None or written.facts is None else Jsonb(asdict(written))
    ended = conn.execute(
        """
        update relay.spark_batches as b
           set batch = null, data = null, files = null,
               last_epoch = case when former.batch = noted.batch then b.epoch else b.last_epoch end,
               last_batch = case when former.batch = noted.batch then noted.facts else b.last_batch end
          from relay.spark_batches as former
          left join (select %(batch)s::uuid as batch, %(noted)s::jsonb as facts) as noted on noted.facts is not null
         where (b.group_id, b.sink, b.target) = (former.group_id, former.sink, former.target)
           and b.group_id = %(group)s and b.sink = %(sink)s and b.batch is not null
        returning former.batch::text
        """,
        {"group": group, "sink": sink, "batch": batch, "noted": noted},
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
