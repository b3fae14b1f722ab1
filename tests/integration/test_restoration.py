"""Events that retention has dropped come back from the archive, for who begins at the beginning."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from relay.admin.retention import partition_new, restore
from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX
from relay.faults import ConfigurationError
from relay.model.events import FIELDS
from relay.retention.partitions import partitions
from relay.spark.session import Session
from tests.integration.test_retention import KEEP, ranges, turn
from tests.outbox import Copied, Outbox, initialise, relaying, wait_until
from tests.process import administer

NOW = datetime.now(UTC)


def install(outbox: Outbox) -> None:
    outbox.install(**KEEP)
    partition_new(outbox.settings(**KEEP), "1d", outbox.installer_dsn)


@pytest.fixture
def rotated(copied: Copied) -> Iterator[Outbox]:
    """An outbox that is partitioned from the start."""
    with copied("restoration", install) as made:
        yield made


def archiving(outbox: Outbox, path: Path, **more: Any) -> dict[str, Any]:
    """A configuration with an archive, which has everything from the beginning."""
    lake = {"type": "spark", "path": str(path), "start": "beginning", "every": 0.2, **more}
    return {
        "handlers": {**outbox.config()["handlers"], "lake": lake},
        "routes": [{"handlers": ["projection", "lake"]}],
        "retention": {"keep": "7d", "archive": "lake"},
    }


def settings_of(outbox: Outbox, path: Path, **more: Any) -> Settings:
    return outbox.settings(**archiving(outbox, path, **more))


def archive(outbox: Outbox, path: Path) -> None:
    """Write what is in the outbox as a Spark sink does, without Spark."""
    listed = ", ".join(
        f"{name}::text"
        if name in ("id", "host_id", "user_id", "transaction_id", "payload", "metadata")
        else name
        for name in FIELDS
    )
    rows = outbox.conn.execute(
        f"select {listed} from outbox_message_t order by c_offset".encode()
    ).fetchall()
    columns = {name: [row[number] for row in rows] for number, name in enumerate(FIELDS)}
    columns["relay_batch"] = ["x-1"] * len(rows)
    pyarrow.parquet.write_to_dataset(pa.table(columns), path, partition_cols=["relay_batch"])


CONTENT = f"select {', '.join(FIELDS)} from outbox_message_t order by c_offset"
BEGIN, END = (f"{NOW - timedelta(days=days):%Y-%m-%d}" for days in (101, 98))


def past(outbox: Outbox, transactions: int) -> None:
    """Publish events that tell of a day long ago."""
    outbox.fill(transactions)
    outbox.conn.execute(
        "update outbox_message_t set event_ts = event_ts - interval '100 days' "
        "where event_ts > now() - interval '1 day'"
    )


@pytest.fixture
def dropped(rotated: Outbox, tmp_path: Path) -> list[Any]:
    """100 events that were relayed, archived and dropped: their content."""
    past(rotated, 20)
    content = rotated.conn.execute(CONTENT.encode()).fetchall()
    archive(rotated, tmp_path / "lake")
    with relaying(rotated.settings(**KEEP)):
        rotated.wait_drained()
        rotated.wait_compared()
    turn(rotated.settings(**KEEP), days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 0
    return content


def test_they_come_back_as_they_were(rotated: Outbox, tmp_path: Path, dropped: list[Any]) -> None:
    """Nobody who has read them reads them again, and they stay for `keep` once more."""
    settings = settings_of(rotated, tmp_path / "lake")
    done = restore(settings, BEGIN, END, rotated.installer_dsn)
    assert done.events == 100
    assert rotated.conn.execute(CONTENT.encode()).fetchall() == dropped
    kind = "select relpersistence::text from pg_class where oid = to_regclass(%s)"
    assert rotated.value(kind, (done.partition,)) == "p"
    assert rotated.value("select count(*) from outbox_message_t where c_xid is not null") == 0
    with relaying(rotated.settings(**KEEP)):
        rotated.fill(2)
        rotated.wait_drained()
        rotated.wait_compared()
    rotated.assert_exact()
    assert rotated.value("select count(*) from projection") == 110
    turn(rotated.settings(**KEEP), days=6)
    assert rotated.value("select count(*) from outbox_message_t") == 110
    turn(rotated.settings(**KEEP), days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 0


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_new_projection_reads_archive_and_table_as_one(
    rotated: Outbox, tmp_path: Path, dropped: list[Any], mode: str
) -> None:
    restore(settings_of(rotated, tmp_path / "lake"), BEGIN, END, rotated.installer_dsn)
    rotated.fill(20)
    rotated.conn.execute("truncate projection")
    source = {
        "dsn": rotated.relay_dsn,
        "slot": f"{rotated.slot}_new",
        "publication": rotated.slot,
        "mode": mode,
    }
    settings = rotated.settings(group="new", source=source)
    initialise(settings, start="beginning")
    with relaying(settings):
        wait_until(lambda: rotated.value("select count(*) from projection") == 200)
    rotated.assert_exact()


def drop_first(outbox: Outbox) -> None:
    """Drop the partition that has all times up to today, as retention does."""
    for each in partitions(outbox.conn, OWN_OUTBOX):
        if each.lower is None and each.upper is not None:
            outbox.conn.execute(f"drop table {each.name}".encode())


def test_what_is_there_already_is_not_restored(rotated: Outbox, tmp_path: Path) -> None:
    """A killed run has left its table, and some of the events are still in the outbox."""
    past(rotated, 4)
    archive(rotated, tmp_path / "lake")
    rotated.conn.execute(
        "create temp table kept as select * from outbox_message_t where c_offset > 5;"
        "update kept set c_ts = c_ts + interval '2 days'"
    )
    drop_first(rotated)
    rotated.conn.execute("insert into outbox_message_t select * from kept")
    left = f"outbox_message_t_p{BEGIN.replace('-', '')}"
    with psycopg.connect(rotated.installer_dsn) as installer:
        installer.execute(f"create unlogged table {left} (a int)".encode())
    assert (
        restore(settings_of(rotated, tmp_path / "lake"), BEGIN, END, rotated.installer_dsn).events
        == 5
    )
    assert rotated.value("select count(*) from outbox_message_t") == 20
    assert rotated.value("select count(distinct id) from outbox_message_t") == 20


def test_what_cannot_be_restored_is_said(rotated: Outbox, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    settings = settings_of(rotated, path)

    def refused(
        message: str, given: Settings = settings, begin: str = BEGIN, end: str = END
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            restore(given, begin, end, rotated.installer_dsn)

    refused("retention.archive: names no sink", rotated.settings(**KEEP))
    refused(
        "handlers.lake: relay restores only from a path in the format",
        settings_of(rotated, path, format="csv"),
    )
    refused("--from: public.outbox_message_t_before has the range from the beginning")
    refused("--from: 'soon' is not a time", begin="soon")
    refused(f"--to: {BEGIN} is not after", begin=END, end=BEGIN)
    drop_first(rotated)
    refused(r"handlers\.lake\.path: cannot be read")
    for odd, kind in (
        ("s3a://127.0.0.1:1/lake?region=nowhere&scheme=gopher", "parquet"),
        ("wasbs://lake@account/events", "parquet"),
        ("nowhere://lake/events", "delta"),
    ):
        elsewhere = settings_of(rotated, path, format=kind)
        lake = elsewhere.spark_handlers["lake"]
        elsewhere.handlers["lake"] = lake.model_copy(update={"path": odd})
        refused(
            r"^handlers\.lake\.path: cannot be read: (?!Unrecognized filesystem type in URI: s3a)[^\n]+$",
            elsewhere,
        )
    pyarrow.parquet.write_to_dataset(pa.table({"id": ["a"], "event_ts": [NOW]}), path)
    refused("its files lack host_id, user_id")
    shutil.rmtree(path)
    past(rotated, 1)
    archive(rotated, path)
    damaged = path / "relay_batch=x-1" / "damaged.parquet"
    damaged.write_bytes(b"PAR1 and nothing else PAR1")
    refused(r"^handlers\.lake\.path: cannot be read: [^\n]*damaged\.parquet")
    damaged.unlink()
    rotated.conn.execute("update outbox_message_t set c_ts = event_ts")
    refused("the default partition of public.outbox_message_t has events of")
    assert len(ranges(rotated)) == len(set(ranges(rotated)))


def test_a_table_without_partitions_is_refused(outbox: Outbox, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="run `relay partition` first"):
        restore(settings_of(outbox, tmp_path / "lake"), BEGIN, END, outbox.installer_dsn)


@pytest.mark.rare
@pytest.mark.parametrize("file_format", ["parquet", "delta"])
def test_a_sink_is_rebuilt_from_archive_and_table(
    rotated: Outbox, spark_session: Session, tmp_path: Path, file_format: str
) -> None:
    """Written by a Spark sink, dropped by retention, restored by the command, and in a new sink's files."""
    first = archiving(rotated, tmp_path / "lake", format=file_format)
    past(rotated, 20)
    settings = rotated.settings(**first)
    rotated.install_again(settings)
    with relaying(settings, spark_session):
        rotated.wait_drained()
        rotated.wait_compared()
        rotated.wait_delivered("lake", 120)
        wait_until(
            lambda: not rotated.column("select 1 from relay.spark_batches where batch is not null")
        )
    turn(settings, days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 0
    rotated.fill(20)
    file = rotated.config_file(tmp_path / "relay.yaml", **first)
    done = administer(rotated, "restore", "--config", str(file), "--from", BEGIN, "--to", END)
    assert done.stdout.startswith("restored 100 events into public.outbox_message_t_p"), done.stderr
    ids = rotated.column("select id::text from outbox_message_t order by id")
    assert len(ids) == 200
    second = archiving(rotated, tmp_path / "lake", format=file_format)
    new = {"type": "spark", "path": str(tmp_path / "new"), "start": "beginning", "every": 0.2}
    second["handlers"]["new"] = new
    second["routes"] = [{"handlers": ["projection", "lake", "new"]}]
    settings = rotated.settings(**second)
    rotated.install_again(settings)
    with relaying(settings, spark_session):
        rotated.wait_delivered("new", 120)
    found = pyarrow.dataset.dataset(tmp_path / "new", format="parquet", partitioning="hive")
    assert sorted(found.to_table()["id"].to_pylist()) == ids
