"""The schema from SQL: publishing, offsets, triggers, installation, rights."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any, get_args

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay import client
from relay.admin.check import examine, require
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.demo.embedded import wheel_binaries
from relay.faults import ConfigurationError
from relay.store import migrations
from tests.field.test_upgrades import UPDATES
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.pages import blocks
from tests.process import ROOT


def offsets(outbox: Outbox) -> list[int]:
    return outbox.column("select c_offset from outbox_message_t order by c_offset")


PUBLISHED = """
    insert into outbox_message_t (host_id, event_type, payload)
    select %s, 'x', to_jsonb(n) from generate_series(%s::int, %s::int) as n
"""


def by_publish(conn: psycopg.Connection[Any], first: int, last: int) -> None:
    numbers = range(first, last + 1)
    events = [{**event(1), "payload": number} for number in numbers]
    conn.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb(events)))


def by_client(conn: psycopg.Connection[Any], first: int, last: int) -> None:
    events = [client.Event("x", payload=number) for number in range(first, last + 1)]
    client.Outbox().publish(conn, events, host_id=host(1))


def by_insert(conn: psycopg.Connection[Any], first: int, last: int) -> None:
    conn.execute(PUBLISHED, (host(1), first, last))


def by_copy(conn: psycopg.Connection[Any], first: int, last: int) -> None:
    columns = "host_id, event_type, payload"
    with conn.cursor().copy(f"copy outbox_message_t ({columns}) from stdin".encode()) as copy:
        for number in range(first, last + 1):
            copy.write_row((host(1), "x", str(number)))


Form = Callable[[psycopg.Connection[Any], int, int], None]


def test_publish_stamps_its_events(outbox: Outbox) -> None:
    transaction = outbox.publish(
        host(1), event(1), event(2, aggregate_version=7, metadata={"k": 1}), event(3)
    )
    rows = outbox.conn.execute(
        "select transaction_id, transaction_ordinal, transaction_count, c_offset, payload->>'amount',"
        " aggregate_version, metadata, host_id from outbox_message_t order by c_offset"
    ).fetchall()
    assert [row[:5] for row in rows] == [(transaction, n, 3, n, str(n)) for n in (1, 2, 3)]
    assert rows[1][5:7] == (7, {"k": 1})
    assert {row[7] for row in rows} == {host(1)}


@pytest.mark.parametrize("form", [by_publish, by_client])
def test_ids_begin_with_the_time(outbox: Outbox, form: Form) -> None:
    """They sort by it, and the page says how to ask for those of a time."""
    now = "select clock_timestamp()"
    times = []
    for number in range(1, 4):
        times.append(outbox.value(now))
        with outbox.publisher.transaction():
            form(outbox.publisher, number, number)
        # The time has gone on by more than ids tell.
        wait_until(
            lambda: outbox.value(
                "select clock_timestamp() > max(event_ts) + interval '2 ms' from outbox_message_t"
            )
        )
    ids = outbox.column("select id from outbox_message_t order by c_offset")
    assert ids == sorted(ids)
    assert {each.version for each in ids} == {7}
    assert {each.variant for each in ids} == {uuid.RFC_4122}
    page = (ROOT / "docs/how-to/publish-sql.md").read_text()
    (query,) = (each.text for each in blocks(page) if each.file == "published.sql")
    for number, moment in enumerate(times, 1):
        of_then = query.replace("2026-11-28 12:00Z", moment.isoformat())
        found = [payload for _, payload in outbox.conn.execute(of_then.encode())]
        assert found == list(range(number, 4))


def test_an_event_above_the_limit_is_refused(outbox: Outbox) -> None:
    limited = {**outbox.config()["source"], "max_event_bytes": 50_000}
    outbox.install_again(outbox.settings(source=limited))
    outbox.publish(host(1), *(event(1, metadata={"note": "x" * 40_000}) for _ in range(3)))
    with pytest.raises(
        psycopg.DataError, match=r"event 2 of the array has \d+ bytes .*50000"
    ) as refused:
        outbox.publish(host(1), event(1), event(1, metadata={"note": "x" * 60_000}))
    assert "source.max_event_bytes" in str(refused.value.diag.message_hint)
    insert = (
        "insert into outbox_message_t (host_id, event_type, payload)"
        " values (%s, 'x', to_jsonb(repeat('x', %s)))"
    )
    outbox.conn.execute(insert, (host(1), 40_000))
    with pytest.raises(psycopg.errors.CheckViolation, match="relay_max_event_bytes"):
        outbox.conn.execute(insert, (host(1), 60_000))
    # Copied from another table it comes compressed, with a size of its own.
    outbox.conn.execute(
        "create table copied as select 1 as n, to_jsonb(repeat('x', 60000)) as payload, null::jsonb as metadata"
    )
    for columns in ("payload", "metadata, payload"):
        copy = f"insert into outbox_message_t (host_id, event_type, {columns}) select %s, 'x', "
        values = "payload" if columns == "payload" else "payload, '{}'"
        with pytest.raises(psycopg.errors.CheckViolation, match="relay_max_event_bytes"):
            outbox.conn.execute(f"{copy}{values} from copied".encode(), (host(1),))
    # What was accepted before stays when the limit is lowered.
    outbox.install_again(outbox.settings(source={**limited, "max_event_bytes": 20_000}))
    outbox.install_again(outbox.settings())
    outbox.conn.execute(insert, (host(1), 60_000))
    assert outbox.value("select count(*) from outbox_message_t") == 5


def test_publish_works_inside_the_callers_transaction(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    with psycopg.connect(outbox.publisher_dsn) as publisher:
        publisher.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(2)])))
        assert offsets(outbox) == [1]
        publisher.rollback()
    outbox.publish(host(1), event(3))
    assert offsets(outbox) == [1, 3]
    assert outbox.column("select payload->>'amount' from outbox_message_t order by c_offset") == [
        "1",
        "3",
    ]


@pytest.mark.parametrize("isolation", list(psycopg.IsolationLevel))
def test_publishers_do_not_wait_for_each_other(
    outbox: Outbox, isolation: psycopg.IsolationLevel
) -> None:
    publish = "select relay.publish(%s, null, %s)"
    with (
        psycopg.connect(outbox.publisher_dsn) as one,
        psycopg.connect(outbox.publisher_dsn) as other,
        relaying(outbox.settings()),
    ):
        one.isolation_level = other.isolation_level = isolation
        other.execute("set lock_timeout = '1s'")
        other.commit()
        one.execute(publish, (host(1), Jsonb([event(1)])))
        other.execute(publish, (host(1), Jsonb([event(2)])))
        one.execute(publish, (host(1), Jsonb([event(3)])))
        other.commit()
        one.commit()
        outbox.wait_handled()
    assert outbox.column("select amount from projection order by seq") == [2, 1, 3]
    outbox.assert_complete()


def test_defaults_that_polling_needs_are_restored(outbox: Outbox) -> None:
    for column in ("c_xid", "c_offset"):
        outbox.conn.execute(f"alter table outbox_message_t alter {column} drop default".encode())
    with pytest.raises(ConfigurationError, match=r"c_xid of .* has no default"):
        require(outbox.settings())
    outbox.install_again(outbox.settings())
    outbox.publish(host(1), event(1))
    assert outbox.conn.execute(
        "select c_xid is null, c_offset from outbox_message_t"
    ).fetchall() == [(False, 1)]


def test_every_row_tells_its_transaction_inside_savepoints_too(outbox: Outbox) -> None:
    with outbox.conn.transaction():
        outbox.publish(host(1), event(1))
        with outbox.conn.transaction():
            outbox.publish(host(1), event(2))
        this = outbox.value("select pg_current_xact_id()::text")
    outbox.conn.execute("update outbox_message_t set user_id = %s", (host(5),))
    assert outbox.column("select distinct c_xid::text from outbox_message_t") == [this]


def test_numbers_without_gaps(outbox: Outbox) -> None:
    gapless = outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"})
    outbox.publish(host(1), event(0))
    with outbox.conn.transaction(force_rollback=True):
        outbox.publish(host(1), event(0))
    assert "c_offset of public.outbox_message_t without gaps" in initialise(gapless)
    assert initialise(gapless) == []
    with outbox.conn.transaction():
        outbox.publish(host(1), event(1))
        with outbox.conn.transaction(force_rollback=True):
            outbox.publish(host(1), event(2))
        outbox.publish(host(1), event(3), event(4))
    assert offsets(outbox) == [1, 2, 3, 4]
    assert outbox.column("select payload->>'amount' from outbox_message_t order by c_offset") == [
        "0",
        "1",
        "3",
        "4",
    ]
    outbox.drain(gapless)
    assert "c_offset of public.outbox_message_t from a sequence" in initialise(outbox.settings())
    outbox.publish(host(1), event(5))
    assert max(offsets(outbox)) > 4
    outbox.drain(outbox.settings())
    outbox.assert_exact()


FORMS = (by_publish, by_client, by_insert, by_copy)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_publishing_has_numbers_without_gaps(outbox: Outbox, form: Form) -> None:
    """In the order of its events, whatever is rolled back or prepared."""
    initialise(outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"}))
    with psycopg.connect(outbox.publisher_dsn) as conn:
        form(conn, 1, 3)
        with conn.transaction(force_rollback=True):
            form(conn, 100, 150)
        form(conn, 4, 4)
        conn.commit()
        form(conn, 100, 150)
        conn.rollback()
        for how in ("rollback", "commit"):
            form(conn, 5, 7)
            conn.execute(f"prepare transaction '{outbox.slot}'".encode())
            conn.commit()
            outbox.publisher.execute(f"{how} prepared '{outbox.slot}'".encode())
        form(conn, 8, 60)
        with conn.transaction(force_rollback=True):
            form(conn, 100, 150)
        form(conn, 61, 75)
    assert offsets(outbox) == list(range(1, 76))
    assert outbox.column("select payload::int from outbox_message_t order by c_offset") == [
        *range(1, 76)
    ]


def test_publish_takes_the_numbers_of_its_events_at_once(outbox: Outbox) -> None:
    """The counter's row has one version more, not one for each event, which each next one would walk over."""
    initialise(outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"}))
    with outbox.conn.transaction():
        by_publish(outbox.conn, 1, 500)
        assert outbox.value(UPDATES) == 1
        by_insert(outbox.conn, 501, 502)
        assert outbox.value(UPDATES) == 3
        by_publish(outbox.conn, 503, 510)
        by_publish(outbox.conn, 511, 521)
    assert outbox.column("select payload::int from outbox_message_t order by c_offset") == [
        *range(1, 522)
    ]
    assert offsets(outbox) == list(range(1, 522))


def wait_published(outbox: Outbox, count: int) -> None:
    wait_until(lambda: len(offsets(outbox)) >= count)


def test_a_switch_of_numbers_waits_for_publishers_and_they_for_it(outbox: Outbox) -> None:
    """Whoever publishes meanwhile has a number of before or of after it."""
    gapless = outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"})
    ended = Event()
    with ExitStack() as stack:

        def publish() -> None:
            with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:
                while not ended.is_set():
                    by_publish(conn, 1, 3)
                    by_publish(conn, 1, 11)

        threads = [Thread(target=publish) for _ in range(3)]
        for each in threads:
            stack.callback(each.join, 30)
            each.start()
        stack.callback(ended.set)
        for settings in (gapless, outbox.settings(), gapless):
            assert initialise(settings)
            wait_published(outbox, len(offsets(outbox)) + 30)
    found = offsets(outbox)
    assert len(found) == len(set(found))


def test_two_publishers_of_numbers_without_gaps_take_turns(outbox: Outbox) -> None:
    """A second one waits for the first; with a snapshot from before it fails, and does not give a number again."""
    initialise(outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"}))
    with (
        psycopg.connect(outbox.publisher_dsn) as one,
        psycopg.connect(outbox.publisher_dsn) as other,
    ):
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        for committed in (False, True):
            other.execute("select 1")
            by_insert(one, 1, 2)
            ended: list[str] = []

            def insert(ended: list[str] = ended) -> None:
                try:
                    by_insert(other, 3, 3)
                    other.commit()
                    ended.append("committed")
                except psycopg.errors.SerializationFailure:
                    other.rollback()
                    ended.append("refused")

            thread = Thread(target=insert)
            thread.start()
            wait_until(
                lambda: (
                    outbox.value(
                        "select wait_event_type from pg_stat_activity where pid = %s",
                        (other.info.backend_pid,),
                    )
                    == "Lock"
                )
            )
            one.commit() if committed else one.rollback()
            thread.join(30)
            assert ended == ["refused" if committed else "committed"]
    assert offsets(outbox) == [1, 2, 3]


def test_c_offset_is_indexed_where_the_configuration_says_so(outbox: Outbox) -> None:
    """For readers by number, whose publishers go on meanwhile; `relay init` removes its index, and no other one."""
    source = outbox.config()["source"]
    plain, indexed = outbox.settings(), outbox.settings(source={**source, "index_offsets": True})

    def said(settings: Settings) -> list[tuple[Severity, str]]:
        found = [each for each in examine(settings) if each.subject == "index"]
        return [(each.level, each.text) for each in found if "c_offset" in each.text]

    outbox.fill(200)
    assert said(plain) == [(Severity.OK, "publishers pay for no index on c_offset")]
    ((level, text),) = said(indexed)
    assert level is Severity.WARNING
    assert "has no index on c_offset" in text
    done: list[str] = []
    with psycopg.connect(outbox.publisher_dsn) as publisher:
        publisher.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
        thread = Thread(target=lambda: done.extend(initialise(indexed)))
        thread.start()
        # It waits for the transaction, and nobody waits for it.
        wait_until(
            lambda: bool(
                outbox.column(
                    "select 1 from pg_stat_activity where datname = current_database()"
                    " and query ~ '^create index' and wait_event_type = 'Lock'"
                )
            )
        )
        outbox.publish(host(1), event(2))
        publisher.commit()
        thread.join(30)
    assert done == [
        "index of public.outbox_message_t on c_offset, for readers by number",
    ]
    assert initialise(indexed) == []
    assert said(indexed) == [(Severity.OK, "c_offset is indexed")]
    outbox.conn.execute("analyze outbox_message_t")
    plan = outbox.column(
        "explain select * from outbox_message_t where c_offset > 900 order by c_offset limit 50"
    )
    assert "Index Scan using outbox_message_t_relay_c_offset" in "".join(plan)
    ((level, text),) = said(plain)
    assert level is Severity.WARNING
    assert "is false, but publishers still pay" in text
    assert initialise(plain) == ["index of public.outbox_message_t on c_offset removed"]
    outbox.conn.execute("create index own on outbox_message_t (c_offset)")
    assert said(indexed) == [(Severity.OK, "c_offset is indexed")]
    assert initialise(indexed) == []
    assert initialise(plain) == []


def test_check_compares_the_numbers_with_the_configuration(outbox: Outbox) -> None:
    def found(settings: Settings) -> tuple[Severity, str]:
        (finding,) = (each for each in examine(settings) if each.subject == "offsets")
        return finding.level, finding.text

    gapless = outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"})
    assert found(outbox.settings())[0] is Severity.OK
    level, text = found(gapless)
    assert level is Severity.WARNING
    assert text.startswith("source.offsets: is gapless, but public.outbox_message_t has no")
    assert "run `relay init`" in text
    initialise(gapless)
    assert found(gapless)[0] is Severity.OK
    level, text = found(outbox.settings())
    assert level is Severity.WARNING
    assert "publishers still take turns: run `relay init`" in text
    outbox.conn.execute("alter table outbox_message_t disable trigger relay_fill_offset")
    outbox.publish(host(1), event(1))
    assert found(gapless)[0] is Severity.WARNING
    assert initialise(gapless)
    assert found(gapless)[0] is Severity.OK
    outbox.publish(host(1), event(2))
    assert offsets(outbox) == [1, 2]


def test_without_a_column_there_are_no_numbers_without_gaps(database: str) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(
            "create table events (id uuid, host_id uuid, event_type text, payload jsonb, number bigint)"
        )
        outbox.give("events")
        source = {**outbox.config()["source"], "table": "public.events", "mode": "wal"}
        wrong = outbox.settings(source={**source, "offsets": "gapless"})
        with pytest.raises(ConfigurationError) as refused:
            initialise(wrong)
        (line,) = str(refused.value).splitlines()
        assert line.startswith("source.offsets: gapless fills the column 'c_offset', which")
        assert "or set source.offsets: sequence" in line
        assert outbox.value("select to_regnamespace('relay') is null")
        assert line in [each.text for each in examine(wrong) if each.level is Severity.ERROR]
        mapped = {**source, "offsets": "gapless", "columns": {"c_offset": "number"}}
        assert initialise(outbox.settings(source=mapped))
        outbox.conn.execute("insert into events (id) values (null), (null)")
        assert outbox.column("select number from events") == [1, 2]


def test_each_outbox_has_numbers_without_gaps_of_its_own(outbox: Outbox) -> None:
    outbox.conn.execute(
        """
        create table parts (id uuid default gen_random_uuid(), host_id uuid, event_type text, payload jsonb)
            partition by list (event_type);
        create table parts_a partition of parts for values in ('a');
        create table parts_b partition of parts for values in ('b');
        """
    )
    outbox.give("parts")
    source = outbox.config()["source"]
    own = outbox.settings(source={**source, "offsets": "gapless"})
    parts = {**source, "table": "public.parts", "mode": "poll"}
    initialise(own)
    initialise(outbox.settings(source={**parts, "offsets": "gapless"}))
    insert = (
        "insert into parts (host_id, event_type, payload) values (%(host)s, 'a', '1'), (%(host)s, 'b', '2');"
        "insert into parts_b (host_id, event_type, payload) values (%(host)s, 'b', '3')"
    )
    outbox.conn.execute("set lock_timeout = '5s'; grant insert on parts, parts_b to app_publisher")
    with psycopg.connect(outbox.publisher_dsn, cursor_factory=psycopg.ClientCursor) as publisher:
        for _ in range(2):
            outbox.publish(host(1), event(1), event(2))
            # Publishers of the other outbox are not waited for.
            publisher.execute(insert, {"host": host(1)})
    numbers = "select c_offset from parts order by c_offset"
    assert offsets(outbox) == [1, 2, 3, 4]
    assert outbox.column(numbers) == [1, 2, 3, 4, 5, 6]
    initialise(outbox.settings(source=parts))
    outbox.publish(host(1), event(1))
    outbox.conn.execute("insert into parts (host_id, event_type) values (gen_random_uuid(), 'a')")
    assert offsets(outbox) == [1, 2, 3, 4, 5]
    assert outbox.value("select max(c_offset) from parts") > 6
    assert initialise(own) == []
    assert initialise(outbox.settings(source={**parts, "offsets": "gapless"}))
    outbox.publish(host(1), event(1))
    assert offsets(outbox) == [1, 2, 3, 4, 5, 6]


def test_rows_without_an_offset_get_one(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    outbox.conn.execute(
        "insert into outbox_message_t (host_id, event_type, payload)"
        " select %s, 'x', to_jsonb(n) from generate_series(1, 1000) n",
        (host(1),),
    )
    outbox.publish(host(1), event(1))
    assert offsets(outbox) == list(range(1, 1003))


def test_copy_gets_offsets_too(outbox: Outbox) -> None:
    with (
        outbox.conn.cursor() as cursor,
        cursor.copy("copy outbox_message_t (host_id, event_type, payload) from stdin") as copy,
    ):
        for number in range(100):
            copy.write_row((host(number), "x", "{}"))
    assert offsets(outbox) == list(range(1, 101))


@pytest.mark.parametrize(
    "events",
    [[], {}, None, [1], [{"event_type": "x"}], [{**event(1), "event_type": None}], [event(1), "x"]],
    ids=str,
)
def test_publish_refuses_malformed_events(outbox: Outbox, events: object) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"relay\.publish"):
        outbox.conn.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb(events)))
    outbox.publish(host(1), event(1))
    assert offsets(outbox) == [1]


def test_installing_twice_changes_nothing(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    before = outbox.conn.execute(
        "select name, applied_at from relay.migrations order by name"
    ).fetchall()
    assert initialise(outbox.settings()) == []
    assert (
        outbox.conn.execute(
            "select name, applied_at from relay.migrations order by name"
        ).fetchall()
        == before
    )
    assert len(before) == len(
        {file for side in get_args(migrations.Side) for file in migrations.files(side)}
    )


def test_two_installations_at_once_wait_for_each_other(database: str) -> None:
    failures: list[BaseException] = []

    def install() -> None:
        try:
            with psycopg.connect(database, autocommit=True) as conn:
                for side in ("source", "outbox", "target"):
                    migrations.install(conn, side, "source.dsn")
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_files_are_plain_sql_for_psql(database: str) -> None:
    psql = shutil.which("psql") or str(wheel_binaries() / "psql")
    for _ in range(2):
        for side in ("source", "outbox", "target"):
            for file in migrations.files(side):
                subprocess.run(
                    [psql, "-q", "-v", "ON_ERROR_STOP=1", "-1", "-d", database, "-f", str(file)],
                    check=True,
                    capture_output=True,
                )
    with psycopg.connect(database, autocommit=True) as conn:
        for side in get_args(migrations.Side):
            migrations.require(conn, side, "source.dsn")
        assert migrations.install(conn, "target", "target.dsn") == []


def test_a_publisher_may_publish_and_nothing_else(outbox: Outbox) -> None:
    with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:
        conn.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
        conn.execute(
            "insert into outbox_message_t (host_id, event_type, payload) values (%s, 'x', '{}')",
            (host(1),),
        )
        for forbidden in (
            "select * from outbox_message_t",
            "select setval('relay.offsets', 1)",
            "delete from outbox_message_t",
            "insert into outbox_message_t (host_id, event_type, payload, c_offset) values"
            " (gen_random_uuid(), 'x', '{}', 9223372036854775807)",
            "insert into outbox_message_t (host_id, event_type, payload, c_xid) values"
            " (gen_random_uuid(), 'x', '{}', '3')",
            "select * from relay.dead_letter_queue",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(forbidden)
    assert offsets(outbox) == [1, 2]


def test_the_service_runs_with_least_privilege(outbox: Outbox) -> None:
    outbox.conn.execute("alter role relay login password 'p'; grant insert on projection to relay")
    outbox.conn.execute("grant usage on sequence projection_seq_seq to relay")
    outbox.conn.execute(
        f'revoke temporary on database "{outbox.conn.info.dbname}" from public'.encode()
    )
    dsn = outbox.dsn_as("relay")
    outbox.publish(host(1), event(1))
    bad = outbox.publish(host(1), event(-1))
    outbox.drain(outbox.settings(source={**outbox.config()["source"], "dsn": dsn}))
    assert outbox.column("select amount from projection") == [1]
    assert outbox.column("select transaction_id::uuid from relay.dead_letter_queue") == [bad]
    outbox.conn.execute("alter role relay nologin")


def test_an_outbox_that_was_there_before_is_adopted(database: str, tmp_path: Path) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(
            """
            create schema shop;
            create table shop.events (
                body jsonb not null, kind text not null, tenant uuid not null, event_id uuid primary key, pos bigint
            );
            create table projection (seq bigserial, id uuid, host_id uuid, c_offset bigint, transaction_id uuid,
                                     amount numeric)
            """
        )
        outbox.give("shop.events")
        columns = {
            "id": "event_id",
            "host_id": "tenant",
            "payload": "body",
            "event_type": "kind",
            "c_offset": "pos",
        }
        source = {**outbox.config()["source"], "table": "shop.events", "columns": columns}
        settings = outbox.settings(source=source)
        initialise(settings)
        assert outbox.value("select to_regclass('public.outbox_message_t') is null")
        outbox.conn.execute(
            "insert into shop.events (body, kind, tenant, event_id)"
            " select jsonb_build_object('amount', n), 'x', %s, gen_random_uuid() from generate_series(1, 5) n",
            (host(1),),
        )
        outbox.drain(settings)
        assert outbox.column("select c_offset from projection order by seq") == [1, 2, 3, 4, 5]
        assert outbox.column("select amount from projection order by seq") == [1, 2, 3, 4, 5]
