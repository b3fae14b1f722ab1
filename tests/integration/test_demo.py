"""The demo, run for real on a smaller scale; then its verification, which must see through every way to cheat it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import yaml
from psycopg.rows import class_row
from rich.console import Console

from relay import demo
from relay.demo import (
    SERVER_SETTINGS,
    Scale,
    performance,
    run_demo,
)
from relay.demo.embedded import Cluster
from relay.demo.performance import DemoFailed, Log, LoggedBatch, Performance
from relay.demo.report import judge, verify
from relay.demo.screen import Check, Screen
from relay.demo.shop import Poison
from relay.faults import ConfigurationError
from relay.store.connections import connect

SMALL = Scale(transactions=1_000, hosts=8, import_events=20_000, live_rate=100, live_seconds=2)

ACCOUNTED = "projection + dead letters = outbox"
UNALTERED = "events as they were published"
WHOLE = "business transactions whole"
ORDER = "order of every host"
TOTALS = "totals = projection"
OFFSETS = "offsets of the partitions"
DEAD = "dead letters = poison"
SLOT = "slot confirmed to the end"


@dataclass(frozen=True)
class Ran:
    """A demo that is over, and its server, running again."""

    verified: bool
    output: str
    left_running: list[psutil.Process]
    cluster: Cluster

    @property
    def dsn(self) -> str:
        return self.cluster.dsn("demo")


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that any account can enter, unlike pytest's own when root runs the tests."""
    path = Path(tempfile.mkdtemp(prefix="relay-test-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def ran() -> Iterator[Ran]:
    output = StringIO()
    with public_folder() as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DEMO_FOLDER", str(folder))
            verified = run_demo(Console(file=output, width=120), folder, SMALL)
        left = descendants(folder)
        with Cluster(folder, settings=SERVER_SETTINGS) as cluster:
            yield Ran(verified, output.getvalue(), left, cluster)


def descendants(folder: Path) -> list[psutil.Process]:
    """Whatever inherited the environment of a demo in this folder, orphans included."""
    found = []
    for candidate in psutil.process_iter():
        with suppress(psutil.Error):
            if candidate.environ().get("DEMO_FOLDER") == str(folder):
                found.append(candidate)
    return found


def test_descendants_are_found() -> None:
    folder = Path("/nowhere")
    with subprocess.Popen(["cat"], env={"DEMO_FOLDER": "/nowhere"}, stdin=subprocess.PIPE) as cat:
        assert [process.pid for process in descendants(folder)] == [cat.pid]
        cat.communicate()
    assert descendants(folder) == []


@pytest.mark.rare
@pytest.mark.slow
def test_every_promise_is_kept(ran: Ran) -> None:
    assert ran.verified, ran.output
    assert "✗" not in ran.output
    assert ran.output.count("✓") == 10
    assert ran.left_running == []


@pytest.mark.rare
@pytest.mark.slow
def test_the_summary_says_what_the_database_holds(ran: Ran) -> None:
    with connect(ran.dsn) as conn:
        (events,) = conn.execute("select count(*) from public.outbox_message_t").fetchone() or (0,)
        dead = conn.execute(
            "select handler, count(distinct (host_id, user_id, commit_lsn, transaction_id))"
            " from relay.dead_letter_queue group by handler"
        ).fetchall()
    assert events == 26_000
    assert "26,000 of 8 hosts" in ran.output
    assert dict(dead) == {"projection": 9, "totals": 2, None: 2}
    assert "65 events of 13 transactions" in ran.output


@pytest.mark.rare
@pytest.mark.slow
def test_the_largest_transaction_is_too_large_for_memory(ran: Ran) -> None:
    limits = yaml.safe_load(performance.configuration_file().read_text())["batch"]
    with connect(ran.dsn) as conn:
        row = conn.execute(
            "select count(*), sum(octet_length(payload::text)), count(distinct transaction_id)"
            " from public.outbox_message_t where event_type = 'catalogue.product_imported'"
        ).fetchone()
    assert row is not None
    events, size, transactions = row
    assert transactions == 1
    assert events > limits["max_events"]
    assert size > limits["max_bytes"]
    assert "20,000 events, " in ran.output


def poisons(conn: psycopg.Connection[Any]) -> list[Poison]:
    """The dead letters, which were the poison exactly when the demo ended."""
    with conn.cursor(row_factory=class_row(Poison)) as cursor:
        return cursor.execute(
            "select event_id::text, handler, substring(exception from '^[A-Za-z]+') as fault"
            " from relay.dead_letter_queue"
        ).fetchall()


def broken(conn: psycopg.Connection[Any], expected: list[Poison], end: str = "0/1") -> set[str]:
    return {check.promise for check in verify(conn, expected, end) if not check.kept}


# Two events of one host whose rows in the projection are far from each other.
TWO = """
    with two as (
        select min(seq) as a, max(seq) as b from shop.projection
         where event_type = 'order.line_added' and host_id = (select min(host_id::text)::uuid from shop.projection)
    )
"""
ONE = "(select min(seq) from shop.projection where event_type = 'order.line_added')"

CHEATS = {
    "missing": (f"delete from shop.projection where seq = {ONE}", {ACCOUNTED, WHOLE}),
    "duplicated": (
        "insert into shop.projection (id, host_id, transaction_id, c_offset, event_type, amount)"
        f" select id, host_id, transaction_id, c_offset, event_type, amount from shop.projection where seq = {ONE}",
        {ACCOUNTED, ORDER},
    ),
    "swapped": (
        TWO
        + """
        update shop.projection p
           set (id, transaction_id, c_offset, event_type, amount) =
               (o.id, o.transaction_id, o.c_offset, o.event_type, o.amount)
          from two join shop.projection o on o.seq in (a, b)
         where p.seq in (a, b) and o.seq <> p.seq
        """,
        {ORDER},
    ),
    "foreign": (
        "insert into shop.projection (id, host_id, c_offset, event_type, amount)"
        " select gen_random_uuid(), host_id, c_offset, event_type, amount"
        f" from shop.projection where seq = {ONE}",
        {ACCOUNTED},
    ),
    "altered": (f"update shop.projection set amount = amount + 1 where seq = {ONE}", {UNALTERED}),
    "transaction forgotten": (
        f"delete from shop.projection p using shop.projection o where o.seq = {ONE}"
        " and p.transaction_id = o.transaction_id",
        {ACCOUNTED, TOTALS},
    ),
    "transaction torn": (
        f"""
        with torn as (delete from shop.projection where seq = {ONE} returning *)
        insert into relay.dead_letter_queue (group_id, event_id, host_id, user_id, transaction_id, c_offset, event_type,
                                             payload, metadata, handler, exception)
        select 'demo', id, o.host_id, user_id, o.transaction_id, o.c_offset, o.event_type, payload, metadata,
               'projection', 'CheckViolation: torn'
          from torn join public.outbox_message_t o using (id)
        """,
        {WHOLE, DEAD},
    ),
    "dead letter lost": (
        "delete from relay.dead_letter_queue where id = (select min(id) from relay.dead_letter_queue)",
        {ACCOUNTED, DEAD},
    ),
    "handler confused": (
        "update relay.dead_letter_queue set handler = 'totals'"
        " where id = (select min(id) from relay.dead_letter_queue where handler = 'projection')",
        {DEAD},
    ),
    "exception confused": (
        "update relay.dead_letter_queue set exception = 'Oops' where handler is null",
        {DEAD},
    ),
    "payload of a dead letter lost": (
        "update relay.dead_letter_queue set payload = null",
        {UNALTERED},
    ),
    "totals too high": ("update shop.customer_totals set orders = orders + 1", {TOTALS}),
    "partition behind": (
        "update relay.positions set next_offset = next_offset - 1 where partition_id ="
        " (select abs(hashtext(host_id::text)::bigint) % 8 from shop.projection limit 1)",
        {OFFSETS},
    ),
}


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("statement", "promises"), CHEATS.values(), ids=CHEATS)
def test_verification_sees_through(ran: Ran, statement: str, promises: set[str]) -> None:
    with connect(ran.dsn) as conn, conn.transaction(force_rollback=True):
        expected = poisons(conn)
        assert broken(conn, expected) == set()
        assert conn.execute(statement.encode()).rowcount > 0
        assert broken(conn, expected) == promises


@pytest.mark.rare
@pytest.mark.slow
def test_verification_misses_the_end_of_the_wal(ran: Ran) -> None:
    with connect(ran.dsn) as conn:
        assert broken(conn, poisons(conn), end="FF/0") == {SLOT}


@pytest.mark.rare
@pytest.mark.slow
def test_verification_sees_a_transaction_in_two_commits(ran: Ran) -> None:
    """In a copy of the database, since only real commits tell; the slot stays with the original."""
    with connect(ran.cluster.dsn()) as conn:
        conn.execute("create database copy template demo")
    with connect(ran.cluster.dsn("copy")) as conn:
        expected = poisons(conn)
        assert broken(conn, expected) == {SLOT}
        conn.execute(f"update shop.projection set amount = amount where seq = {ONE}".encode())
        assert broken(conn, expected) == {SLOT, WHOLE}


@pytest.mark.rare
@pytest.mark.slow
def test_judgement_asks_for_both_engines_and_a_clean_end(ran: Ran) -> None:
    with connect(ran.dsn) as conn:
        expected = poisons(conn)
    performance = Performance(
        expected, datetime.now(UTC), 1, "0/1", 1, [LoggedBatch(1, "inline", 5)]
    )
    failed = {check.promise for check in judge(ran.dsn, performance) if not check.kept}
    assert failed == {"Spark and inline at work", "relay ended by SIGTERM"}


def test_a_broken_promise_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(dsn: str, log: Log, screen: Screen, scale: Scale) -> None:
        log.file.write_text("the last words of relay\n")

    monkeypatch.setattr(demo, "play", play)
    monkeypatch.setattr(demo, "facts", lambda *_: [("events", "1")])
    monkeypatch.setattr(
        demo, "judge", lambda *_: [Check("kept", True, ""), Check("broken", False, "1 missing")]
    )
    output = StringIO()
    assert run_demo(Console(file=output), None) is False
    assert "✗  broken" in output.getvalue()
    assert "the last words of relay" in output.getvalue()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match="is not empty: name a new folder"):
        run_demo(Console(file=StringIO()), tmp_path)


@pytest.mark.slow
def test_relay_that_fails_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = performance.configuration_file().read_text().replace("customer_totals", "gone")
    file = tmp_path / "demo.yaml"
    file.write_text(configuration)
    monkeypatch.setattr(performance, "configuration_file", lambda: file)
    output = StringIO()
    with pytest.raises(DemoFailed, match="relay ended by itself with status 2: ") as raised:
        run_demo(Console(file=output, width=200), None, SMALL)
    assert 'relation "shop.gone" does not exist' in str(raised.value)
    assert "ended by an error" in output.getvalue()


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    """Signalled while relay runs and Spark starts, which is when most is to be taken down."""
    command = [sys.executable, "-m", "relay", "demo"]
    with public_folder() as folder:
        environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Whoever started the tests may have it ignored, as a shell does for what runs in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as running:
            assert running.stdout is not None
            assert any("publishing" in line for line in running.stdout)
            time.sleep(2)
            family = psutil.Process(running.pid).children(recursive=True)
            assert len(family) > 5
            running.send_signal(number)
            assert running.wait(60) == 128 + number
            assert "error" not in running.stdout.read()
        _, alive = psutil.wait_procs(family, timeout=15)
        assert alive == []
        assert list(folder.glob("relay-*")) == []
