"""`relay verify`: what a sink has written against the outbox, for a range of the past."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import psutil
import psycopg
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from relay.admin import verification
from relay.admin.verification import Verification, verify
from relay.cli.app import app
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.spark.session import Session
from relay.spark.verification import CHANGED, MISSING, ONLY_THERE, TWICE
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.pages import DOCS, blocks
from tests.process import ROOT, relay

Written = Callable[..., Settings]


def config(kind: str, folder: Path, dsn: str, **more: Any) -> dict[str, Any]:
    options = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }
    place: dict[str, dict[str, Any]] = {
        "delta": {"path": str(folder / "lake"), "format": "delta"},
        "files": {"path": str(folder / "lake")},
        "orc": {"path": str(folder / "lake"), "format": "orc"},
        "iceberg": {"table": "shop.events", "format": "iceberg", "options": options},
        "jdbc": {"jdbc": {"dsn": dsn, "table": "public.lake"}},
        "callable": {"callable": "tests.callables:write_nowhere"},
        "csv": {"path": str(folder / "lake"), "format": "csv"},
    }
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "lake": {"type": "spark", "every": 0.2, "start": "beginning", **place[kind], **more},
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def write(outbox: Outbox, settings: Settings, session: Session) -> None:
    """Let relay write all that is published."""
    with relaying(settings, session):
        outbox.wait_delivered("lake", 120)


def found(settings: Settings, session: Session, **options: Any) -> Verification:
    asked = {"since": None, "to": None, "most_ids": 3, **options}
    return verify(settings, "lake", session=session, **asked)


LAKE = """
    create table lake (id uuid, host_id uuid, user_id uuid, aggregate_id text, aggregate_version bigint,
                       aggregate_type text, event_type text, event_ts timestamptz, payload jsonb, metadata jsonb,
                       c_offset bigint, transaction_id uuid, transaction_ordinal int, transaction_count int,
                       deliver_at timestamptz, commit_lsn pg_lsn, commit_ts timestamptz, xid bigint, date date,
                       host_bucket int)
"""


@pytest.mark.parametrize(
    "kind",
    [
        "delta",
        pytest.param("files", marks=pytest.mark.rare),
        pytest.param("orc", marks=pytest.mark.rare),
        pytest.param("iceberg", marks=pytest.mark.rare),
        pytest.param("jdbc", marks=pytest.mark.rare),
    ],
)
def test_what_was_written_is_equal_also_beside_what_comes_later(
    outbox: Outbox, spark_session: Session, tmp_path: Path, kind: str
) -> None:
    """A transaction with lower c_offsets commits after the range: its rows are no difference."""
    (tmp_path / "warehouse").mkdir()
    if kind == "jdbc":
        outbox.conn.execute(LAKE)
    settings = outbox.settings(**config(kind, tmp_path, outbox.lake_dsn, max_events=40))
    with psycopg.connect(outbox.publisher_dsn) as late:
        late.execute(
            "insert into outbox_message_t (id, host_id, event_type, payload) values (%s, %s, 'late', '{}')",
            (host(77), host(2)),
        )
        outbox.fill(30, events=5, hosts=20)
        outbox.publish(host(1), event(7, "order.paid", metadata={"trace": "é"}))
        write(outbox, settings, spark_session)
        first = found(settings, spark_session)
        assert first.result.is_equal, first
        assert first.result.events == 151
        late.commit()
    outbox.fill(10, events=2)
    write(outbox, settings, spark_session)
    again = found(settings, spark_session, to=str(first.to))
    assert again.result.is_equal, again
    assert again.result.hashes == first.result.hashes
    rest = found(settings, spark_session, since=str(first.to))
    assert (rest.result.events, rest.result.is_equal) == (21, True), rest
    whole = found(settings, spark_session)
    assert (whole.result.events, whole.result.is_equal) == (172, True), whole
    assert "payload" in whole.result.columns


@pytest.mark.rare
def test_each_kind_of_difference_is_named_with_its_ids(
    outbox: Outbox, spark_session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = outbox.settings(**config("delta", tmp_path, outbox.lake_dsn))
    outbox.fill(20, events=5)
    write(outbox, settings, spark_session)
    ids = outbox.column("select id::text from outbox_message_t order by c_offset")
    table = deltalake.DeltaTable(tmp_path / "lake")
    rows = table.to_pyarrow_table()

    def with_id(*wanted: str) -> pa.Table:
        return rows.filter(pa.compute.is_in(rows["id"], pa.array(wanted)))

    def append(more: pa.Table) -> None:
        deltalake.write_deltalake(tmp_path / "lake", more, mode="append")

    table.delete(f"id in ('{ids[3]}', '{ids[5]}', '{ids[6]}', '{ids[7]}', '{ids[8]}')")
    append(with_id(ids[10]))
    changed = with_id(ids[8])
    payload = changed.schema.get_field_index("payload")
    append(changed.set_column(payload, "payload", pa.array(["s3cret"])))
    strange = with_id(ids[9])
    append(strange.set_column(strange.schema.get_field_index("id"), "id", pa.array([str(host(9))])))
    result = found(settings, spark_session).result
    assert result.counts == {MISSING: 4, TWICE: 1, CHANGED: 1, ONLY_THERE: 1}
    assert result.ids[MISSING] == sorted((ids[3], ids[5], ids[6], ids[7]))[:3]
    assert result.ids[TWICE] == [ids[10]]
    assert result.ids[CHANGED] == [ids[8]]
    assert result.ids[ONLY_THERE] == [str(host(9))]
    assert result.hashes[0] != result.hashes[1]
    file = outbox.config_file(tmp_path / "relay.yaml", **config("delta", tmp_path, outbox.lake_dsn))
    told = relay("verify", "lake", "--config", str(file), "--ids", "1")
    assert told.returncode == 1
    assert told.stdout.startswith(
        "lake differs from the outbox, which has 100 events from 1:1: to "
    )
    assert "4 missing" in told.stdout
    assert f"{MISSING}: {min(ids[3], ids[5], ids[6], ids[7])} and 3 more" in told.stdout
    assert "s3cret" not in told.stdout + told.stderr
    # Until the differing range is left out.
    monkeypatch.setattr(verification, "verify", partial(verify, session=spark_session))
    shown = CliRunner().invoke(
        app, ["verify", "lake", "--config", str(file), "--json", "--from", str(snapshot(outbox))]
    )
    assert shown.exit_code == 0
    found_then = json.loads(shown.stdout)
    assert (found_then["equal"], found_then["events"]) == (True, 0)


def snapshot(outbox: Outbox) -> str:
    text: str = outbox.value("select snapshot::text from relay.sinks where sink = 'lake'")
    return text


def test_dead_deferred_and_edited_events_are_left_out(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**config("delta", tmp_path, outbox.lake_dsn))
    outbox.fill(10, events=5)
    outbox.publish(host(3), event(5, deliver_at="2100-01-01T00:00:00+00:00"))
    deferred = "select count(*) from relay.deferred where sink = 'lake'"
    with relaying(settings, spark_session):
        wait_until(lambda: outbox.value(deferred) == 1, 120)
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events, result.left_out) == (True, 50, 1), result
    first = outbox.value("select id::text from outbox_message_t order by c_offset limit 1")
    deltalake.DeltaTable(tmp_path / "lake").delete(f"id = '{first}'")
    assert found(settings, spark_session).result.counts == {MISSING: 1}
    dead = (
        "insert into relay.dead_letter_queue (group_id, sink, event_id, exception, status)"
        " values ('default', 'lake', %s, 'x', 'dead')"
    )
    outbox.conn.execute(dead, (first,))
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events, result.left_out) == (True, 49, 2), result


@pytest.mark.rare
def test_what_retention_may_have_removed_is_told_apart(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    """Without retention a row that only the table has is a difference; older rows than the outbox has never are."""
    settings = outbox.settings(**config("delta", tmp_path, outbox.lake_dsn))
    outbox.fill(10, events=5)
    write(outbox, settings, spark_session)
    outbox.conn.execute(
        "delete from outbox_message_t where c_offset <= (select min(c_offset) + 9 from outbox_message_t)"
    )
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events, result.removed) == (True, 40, 0), result
    outbox.conn.execute(
        "delete from outbox_message_t where c_offset = (select max(c_offset) - 3 from outbox_message_t)"
    )
    assert found(settings, spark_session).result.counts == {ONLY_THERE: 1}
    outbox.conn.execute(
        "insert into relay.retained (outbox, offset_column, every)"
        " values ('public.outbox_message_t', 'c_offset', '1 day')"
    )
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events, result.removed) == (True, 39, 1), result


def test_a_query_that_keeps_the_id_is_compared_by_it(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    query = (
        "select id, c_offset, current_timestamp() as at from events where event_type <> 'skipped'"
    )
    settings = outbox.settings(**config("delta", tmp_path, outbox.lake_dsn, sql=query))
    outbox.fill(10, events=5)
    outbox.publish(host(1), event(1, "skipped"))
    write(outbox, settings, spark_session)
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events, result.columns) == (True, 50, ["id"]), result
    first = outbox.value("select id::text from outbox_message_t order by c_offset limit 1")
    deltalake.DeltaTable(tmp_path / "lake").delete(f"id = '{first}'")
    assert found(settings, spark_session).result.ids == {MISSING: [first]}


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        (
            "delta",
            {"sql": "select event_type, count(*) as n from events group by 1"},
            "lake.sql: its result has no",
        ),
        ("callable", {}, "lake.callable: relay does not know where the function writes"),
        ("csv", {}, "lake.format: csv does not keep the types"),
        ("files", {}, "there is nothing at"),
        ("delta", {}, "there is nothing at"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    outbox: Outbox, spark_session: Session, tmp_path: Path, kind: str, more: Any, says: str
) -> None:
    settings = outbox.settings(**config(kind, tmp_path, outbox.lake_dsn, **more))
    outbox.begin_sink("lake", "pg_current_snapshot()")
    with pytest.raises(ConfigurationError, match=says):
        found(settings, spark_session, since="beginning")


@pytest.mark.parametrize(
    ("kind", "more"),
    [("callable", {}), ("csv", {})],
)
def test_what_can_never_be_compared_needs_no_session(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: Any
) -> None:
    """Spark was started first, which takes many seconds."""
    monkeypatch.setattr("relay.spark.session.Session.start", None)
    settings = outbox.settings(**config(kind, tmp_path, outbox.lake_dsn, **more))
    with pytest.raises(ConfigurationError, match=r"^handlers\.lake\.(callable|format): "):
        verify(settings, "lake", None, None, 3)


UPSERT: dict[str, Any] = {
    "mode": "upsert",
    "key": ["aggregate_id"],
    "deletes": "event_type = 'order.deleted'",
    "partition_by": [],
}


@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=pytest.mark.rare)])
def test_the_newest_row_of_each_key_is_compared(
    outbox: Outbox, spark_session: Session, tmp_path: Path, kind: str
) -> None:
    """Also of keys whose events are in different batches, are older than the range, or come later."""
    (tmp_path / "warehouse").mkdir()
    settings = outbox.settings(**config(kind, tmp_path, outbox.lake_dsn, **UPSERT))
    for number in range(6):
        for _ in range(3):
            outbox.publish(host(number), event(number, aggregate_id=str(number)))
    write(outbox, settings, spark_session)
    for number in range(3):
        outbox.publish(host(number), event(9, aggregate_id=str(number)))
    outbox.publish(host(4), event(1, "order.deleted", aggregate_id="4"))
    write(outbox, settings, spark_session)
    middle = snapshot(outbox)
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events, result.is_by_key) == (True, 6, True), result
    assert result.hashes[0] == result.hashes[1]
    outbox.publish(host(2), event(5, aggregate_id="2"), event(6, aggregate_id="new"))
    write(outbox, settings, spark_session)
    assert found(settings, spark_session).result.events == 7
    for between in ({"to": middle}, {"since": middle}):
        result = found(settings, spark_session, **between).result
        assert result.is_equal, (between, result)


def test_each_difference_of_a_key_is_named(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**config("delta", tmp_path, outbox.lake_dsn, **UPSERT))
    for number in range(5):
        outbox.publish(host(number), event(1, aggregate_id=str(number)))
    write(outbox, settings, spark_session)
    table = deltalake.DeltaTable(tmp_path / "lake")
    former = table.to_pyarrow_table()
    for number in range(5):
        outbox.publish(host(number), event(2, aggregate_id=str(number)))
    write(outbox, settings, spark_session)
    assert found(settings, spark_session).result.is_equal
    newest: dict[str, str] = dict(
        outbox.conn.execute(
            "select distinct on (aggregate_id) aggregate_id, id::text from outbox_message_t"
            " order by aggregate_id, c_offset desc"
        ).fetchall()
    )
    table = deltalake.DeltaTable(tmp_path / "lake")
    # 0 is gone, 1 is as it was before, 2 has another payload, 3 is there twice, and 7 was never published.
    three = table.to_pyarrow_table().filter(pa.compute.field("aggregate_id") == "3")
    seven = three.set_column(
        three.column_names.index("aggregate_id"), "aggregate_id", pa.array(["7"])
    )
    strange = "7f1f5a3e-3c1c-4f6e-9f5b-0d8f3f1f2a11"
    seven = seven.set_column(seven.column_names.index("id"), "id", pa.array([strange]))
    table.delete("aggregate_id in ('0', '1')")
    table.update(predicate="aggregate_id = '2'", updates={"payload": "'{}'"})
    one = former.filter(pa.compute.field("aggregate_id") == "1")
    # It is between those of the outbox.
    at = seven.column_names.index("c_offset")
    offset = outbox.value("select min(c_offset) + 1 from outbox_message_t")
    seven = seven.set_column(at, seven.schema.field("c_offset"), pa.array([offset]))
    for rows in (one, three, seven):
        deltalake.write_deltalake(tmp_path / "lake", rows, mode="append")
    result = found(settings, spark_session).result
    assert result.ids == {
        MISSING: sorted([newest["0"], newest["1"]]),
        CHANGED: [newest["2"]],
        TWICE: [newest["3"]],
        ONLY_THERE: [strange],
    }


def test_ranges_that_do_not_exist_are_refused(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    settings = outbox.settings(**config("delta", tmp_path, outbox.lake_dsn))
    with pytest.raises(ConfigurationError, match=r"the sink has not written yet|--from"):
        found(settings, spark_session)
    outbox.publish(host(1), event(1))
    write(outbox, settings, spark_session)
    for options, says in (
        ({"to": "1:99999999:"}, "--to: the sink has not written everything up to"),
        ({"since": snapshot(outbox), "to": "5:5:"}, "--from: .* is not before"),
        ({"since": "yesterday"}, "--from: 'yesterday' is no snapshot such as"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            found(settings, spark_session, **options)
    with pytest.raises(ConfigurationError, match="no sink 'projection' of type spark"):
        verify(settings, "projection", None, None, 3, spark_session)


@pytest.mark.rare
def test_the_runbook_mends_a_difference(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    """Rows are removed by hand; the commands of the page make the table whole again, also for what came later."""
    sections = config("delta", tmp_path, outbox.lake_dsn)
    settings = outbox.settings(**sections)
    file = outbox.config_file(tmp_path / "relay.yaml", **sections)
    outbox.fill(10, events=5)
    write(outbox, settings, spark_session)
    ids = sorted(outbox.column("select id::text from outbox_message_t")[:2])
    path = tmp_path / "lake"
    deltalake.DeltaTable(path).delete(f"id in ('{ids[0]}', '{ids[1]}')")
    result = found(settings, spark_session).result
    assert (result.counts, result.ids) == ({MISSING: 2}, {MISSING: ids})
    (block,) = (
        each
        for each in blocks((DOCS / "how-to" / "verify.md").read_text())
        if each.language == "sh"
    )
    with relaying(settings, spark_session):
        for line in block.text.splitlines():
            if line.startswith("#"):
                path.rename(tmp_path / "moved")
                outbox.fill(3, events=5)
                continue
            program, *words = shlex.split(line)
            assert program == "relay"
            done = relay(*words, "--config", str(file), stdin="y\n")
            assert done.returncode == 0, done.stderr
        # The folder is there before the first commit.
        is_there = deltalake.DeltaTable.is_deltatable
        wait_until(lambda: is_there(str(path)) and deltalake.DeltaTable(path).count() >= 65, 120)
        outbox.wait_delivered("lake", 120)
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events) == (True, 65), result


@pytest.mark.rare
def test_a_killed_verification_leaves_nothing(
    outbox: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    """Killed while its tasks run: its sessions and processes end, the sink goes on, and the next run is right."""
    sections = config("delta", tmp_path, outbox.lake_dsn)
    settings = outbox.settings(**sections)
    file = outbox.config_file(tmp_path / "relay.yaml", **sections)
    outbox.fill(10, events=5)
    write(outbox, settings, spark_session)
    sessions = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    others = outbox.value(sessions)
    command = [sys.executable, "-m", "relay", "verify", "lake", "--config", str(file)]
    killed = psutil.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until(
            lambda: any(map(_runs_tasks, _descendants(killed))) or not killed.is_running(), 60
        )
        left = _descendants(killed)
    finally:
        killed.kill()
        killed.wait(30)
    psutil.wait_procs(left, 60)
    assert not [each for each in left if each.is_running()]
    wait_until(lambda: outbox.value(sessions) <= others, 60)
    outbox.fill(2, events=5)
    write(outbox, settings, spark_session)
    result = found(settings, spark_session).result
    assert (result.is_equal, result.events) == (True, 60), result


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _runs_tasks(process: psutil.Process) -> bool:
    """Whether it is the process that starts Spark's Python workers."""
    with suppress(psutil.Error):
        return "relay.spark.daemon" in process.cmdline()
    return False
