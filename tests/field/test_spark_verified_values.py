"""Values for which a comparison of a sink's table with the outbox tells differences that are none, or fails.

Reports: AbsaOSS/pramen#387, apache/spark#45599 and #45638 (infinite times and dates of PostgreSQL).
"""

from __future__ import annotations

from relay.spark import destinations
from tests.outbox import Outbox


def test_infinite_times_of_other_rows_are_null(outbox: Outbox) -> None:
    outbox.conn.execute(
        "create table lake (id text, event_ts timestamptz, commit_ts timestamp, date date);"
        "insert into lake values ('a', 'infinity', '-infinity', 'infinity'),"
        " ('b', '2026-01-01 12:00:00.000005+02', '1969-12-31 23:59:59.999999', '1969-12-31'),"
        " ('c', '12026-01-01 00:00+00', null, '12026-01-01')"
    )
    columns = ("id", "event_ts", "commit_ts", "date")
    reading = destinations._PostgresRows(outbox.dsn, "public.lake", columns, 1)
    (batch,) = reading(0)
    first, second, third = sorted(
        zip(
            *(
                batch.column(name).cast(kind).to_pylist()
                for name, kind in zip(columns, ("string", "int64", "int64", "int32"), strict=True)
            ),
            strict=True,
        )
    )
    assert first == ("a", None, None, None)
    noon = 1_767_261_600_000_005
    assert second == ("b", noon, -1, -1)
    assert third == ("c", 317_336_745_600_000_000, None, 3_672_879)
