"""The runbooks of docs/operations.md: each fault is caused, the commands are run as they stand there, and it is over.

A command's output must have the lines that the guide shows, but for figures, times and ids.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
import yaml
from psycopg.conninfo import make_conninfo
from psycopg.pq import ExecStatus
from psycopg.types.json import Jsonb

from relay.demo.embedded import free_port
from tests.outbox import LONG_SECONDS, event, host, wait_until
from tests.pages import (
    DOCS,
    Command,
    blocks,
    clean_environment,
    commands,
    has_shape,
    make_tools,
)
from tests.postgres import Server, start_server
from tests.webhook import Answer, Webhook

GUIDE = (DOCS / "operations.md").read_text()


def runbook(alert: str) -> list[Command]:
    """The commands of a runbook, in order."""
    section = re.search(rf"^### {alert}\n(.*?)(?=^##)", GUIDE, re.DOTALL | re.MULTILINE)
    assert section is not None
    found = [
        command
        for block in blocks(section[1])
        if block.language == "console"
        for command in commands(block.text)
    ]
    assert found
    return found


@dataclass
class Shop:
    """A shop whose orders go from one database to another and to a webhook; a relay that the test starts and stops."""

    server: Server
    folder: Path
    webhook: Webhook
    config: dict[str, object]
    process: subprocess.Popen[bytes] | None = None

    @property
    def source(self) -> str:
        return self.server.dsn("shop")

    @property
    def target(self) -> str:
        return self.server.dsn("warehouse")

    def environment(self) -> dict[str, str]:
        return clean_environment(
            self.folder / "bin",
            RELAY_CONFIG=str(self.folder / "relay.yaml"),
            SOURCE=self.source,
            TARGET=self.target,
            **self.more,
        )

    more: dict[str, str] = field(default_factory=dict)

    def configure(self, **changes: object) -> None:
        """Write the configuration with changes, which last."""
        self.config |= changes
        (self.folder / "relay.yaml").write_text(yaml.safe_dump(self.config))

    def bash(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment(),
            timeout=120,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def systemctl(self, verb: str) -> None:
        """Start, stop or restart relay as a service manager does: what does not end is killed."""
        if verb != "start" and self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(15 if verb == "stop" else 5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
            self.process = None
        if verb != "stop":
            with (self.folder / "relay.log").open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "relay", "run"],
                    env=self.environment(),
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                )

    def follow(self, command: Command) -> str:
        """Run a command until it prints what the guide shows."""
        words = shlex.split(command.text)
        if words[0] == "systemctl":
            self.systemctl(words[1])
            return ""
        printed = ""
        # What changes something is run once.
        once = re.search(
            r"terminate|alter|checkpoint|relay (dlq replay|deferred run|endpoint enable|queue resume|queue rebuild)",
            command.text,
        )

        def run() -> bool:
            nonlocal printed
            result = self.bash(command.text)
            printed = result.stdout + result.stderr
            return has_shape(printed, command.output)

        if once:
            assert run(), f"{command.text}\n{printed}"
        else:
            try:
                wait_until(run, LONG_SECONDS, every=0.3)
            except AssertionError:
                pytest.fail(
                    f"{command.text}\nprinted\n{printed}\nnot\n" + "\n".join(command.output)
                )
        return printed

    def run_book(self, alert: str, *, mend: str = "") -> None:
        """Run the commands of a runbook; before the one that begins with `mend`, what `mended` does."""
        for command in runbook(alert):
            if mend and command.text.startswith(mend):
                self.mended()
                mend = ""
            self.follow(command)
        assert not mend

    def mended(self) -> None:
        """The work of an operator elsewhere, which a test replaces."""

    def value(self, dsn: str, query: str) -> object:
        with psycopg.connect(dsn, autocommit=True) as conn:
            row = conn.execute(query.encode()).fetchone()
        return row and row[0]

    def publish(self, amount: int = 1, of: uuid.UUID | None = None) -> None:
        with psycopg.connect(self.source, autocommit=True) as conn:
            conn.execute(
                "select relay.publish(%s, null, %s::jsonb)",
                (of or host(1), psycopg.types.json.Jsonb([event(amount)])),
            )

    def wait_healthy(self) -> None:
        wait_until(lambda: self.bash("relay status --check").returncode == 0)

    def assert_applied(self) -> None:
        """Every event is in the target once, and delivered."""
        wait_until(
            lambda: (
                self.value(self.source, "select count(*) from outbox_message_t")
                == self.value(self.target, "select count(distinct id) from orders")
            ),
            LONG_SECONDS,
        )
        assert self.value(self.target, "select count(*) - count(distinct id) from orders") == 0
        published = self.value(self.source, "select count(*) from outbox_message_t")
        wait_until(lambda: len(self.webhook.ids()) == published, LONG_SECONDS)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    make_tools(folder / "bin")
    with start_server() as server, Webhook() as webhook:
        server.create_database("shop")
        server.create_database("warehouse")
        config: dict[str, object] = {
            "source": {"dsn": server.dsn("shop")},
            "target": {"dsn": server.dsn("warehouse")},
            "handlers": {
                "orders": {
                    "type": "sql",
                    "statement": "insert into orders values (%(id)s, (%(payload)s->>'amount')::int)",
                },
                "shop": {
                    "type": "http",
                    "url": webhook.url,
                    "circuit_breaker": {"cool_down": 1},
                    "retry": {"wait": 60},
                },
            },
            "routes": [{"handlers": ["orders", "shop"]}],
            "sinks": {"attach_seconds": 1},
            "batch": {"inline_max_events": 1_000_000_000},
            "dead_letters": {"brake": 3},
        }
        made = Shop(server, folder, webhook, config)
        made.configure()
        with psycopg.connect(made.target, autocommit=True) as conn:
            conn.execute("create table orders (id uuid, amount int check (amount >= 0))")
        assert made.bash("relay init").returncode == 0, made.bash("relay init").stderr
        yield made
        made.systemctl("stop")


@pytest.fixture
def running_shop(shop: Shop) -> Iterator[Shop]:
    """The shop with a healthy relay, before and after."""
    shop.webhook.answers = lambda headers, body: Answer()
    if shop.process is None or shop.process.poll() is not None:
        shop.systemctl("start")
    shop.wait_healthy()
    yield shop
    shop.assert_applied()


@pytest.mark.rare
def test_relay_down(running_shop: Shop) -> None:
    assert running_shop.process is not None
    running_shop.process.kill()
    running_shop.process.wait(10)
    running_shop.publish()
    running_shop.run_book("RelayDown")


@contextmanager
def session(dsn: str, name: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A session that the runbook ends."""
    conn = psycopg.connect(dsn, application_name=name)
    try:
        yield conn
    finally:
        conn.close()


@pytest.mark.rare
@pytest.mark.long
def test_relay_stream_stalled(running_shop: Shop) -> None:
    shop = running_shop
    assert shop.process is not None
    with session(shop.target, "report of March") as report:
        report.execute("select from relay.group_partitions for update")
        shop.publish()
        waiting = (
            "select count(*) from pg_stat_activity where cardinality(pg_blocking_pids(pid)) > 0"
        )
        wait_until(lambda: shop.value(shop.target, waiting) == 1)
        # The process hangs as well.
        shop.process.send_signal(signal.SIGSTOP)
        shop.run_book("RelayStreamStalled")


@pytest.mark.rare
@pytest.mark.long
def test_relay_slot_retains_wal(running_shop: Shop) -> None:
    shop = running_shop
    with session(shop.source, "report of March") as report:
        report.execute("create temporary table month (n int)")
        with psycopg.connect(shop.source, autocommit=True) as other:
            for _ in range(3):
                other.execute("select pg_logical_emit_message(false, '', repeat('x', 17000000))")
                other.execute("checkpoint")
        shop.publish()
        shop.run_book("RelaySlotRetainsWal")


@pytest.mark.rare
def test_relay_slot_lost(running_shop: Shop) -> None:
    shop = running_shop
    shop.systemctl("stop")
    shop.publish()
    with psycopg.connect(shop.source, autocommit=True) as conn:
        conn.execute("alter system set max_slot_wal_keep_size = '16MB'")
        conn.execute("select pg_reload_conf()")
        for _ in range(4):
            conn.execute("select pg_logical_emit_message(false, '', repeat('x', 17000000))")
            conn.execute("select pg_switch_wal()")
        conn.execute("checkpoint")
    shop.run_book("RelaySlotLost")
    # Since then events come from the WAL again.
    shop.publish()
    shop.assert_applied()
    shop.run_book("RelaySlotRecreated")


@pytest.mark.rare
@pytest.mark.long
def test_relay_part_failing(running_shop: Shop) -> None:
    shop = running_shop
    shop.publish()
    shop.assert_applied()
    with session(shop.source, "report of March") as report:
        report.execute("lock table outbox_message_t in access exclusive mode")
        # The audit waits for the lock until its timeout, twice.
        shop.run_book("RelayPartFailing")


@pytest.mark.rare
@pytest.mark.long
def test_relay_sink_lagging(running_shop: Shop) -> None:
    shop = running_shop
    shop.configure(handlers=_with_concurrency(shop, 1))
    shop.systemctl("restart")
    shop.wait_healthy()
    shop.webhook.answers = lambda headers, body: Answer(after=0.2)
    for number in range(50):
        shop.publish(of=host(number))

    def mended() -> None:
        shop.configure(handlers=_with_concurrency(shop, 32))

    shop.mended = mended  # type: ignore[method-assign]
    shop.run_book("RelaySinkLagging", mend="relay check")


def _with_concurrency(shop: Shop, concurrency: int) -> dict[str, object]:
    handlers = shop.config["handlers"]
    assert isinstance(handlers, dict)
    return {**handlers, "shop": {**handlers["shop"], "concurrency": concurrency}}


@pytest.mark.rare
def test_relay_sink_down(running_shop: Shop) -> None:
    shop = running_shop
    shop.webhook.answers = lambda headers, body: Answer(503)
    for number in range(12):
        shop.publish(of=host(number))

    def mended() -> None:
        shop.webhook.answers = lambda headers, body: Answer()

    shop.mended = mended  # type: ignore[method-assign]
    shop.run_book("RelaySinkDown", mend="relay deferred run")


@pytest.mark.rare
def test_relay_endpoint_disabled(running_shop: Shop) -> None:
    shop = running_shop
    handlers = shop.config["handlers"]
    assert isinstance(handlers, dict)
    url = handlers["shop"]["url"] + "?host={host_id}"
    shop.configure(handlers={**handlers, "shop": {**handlers["shop"], "url": url}})
    shop.systemctl("restart")
    shop.wait_healthy()
    shop.webhook.answers = lambda headers, body: Answer(410)
    shop.publish()
    listed = "select endpoint from relay.endpoints where disabled_at is not null"
    wait_until(lambda: shop.value(shop.target, listed) is not None)
    wait_until(
        lambda: (
            shop.value(
                shop.target, "select count(*) from relay.dead_letter_queue where status = 'dead'"
            )
            == 1
        )
    )

    def mended() -> None:
        shop.more["ENDPOINT"] = str(shop.value(shop.target, listed))
        shop.webhook.answers = lambda headers, body: Answer()

    shop.mended = mended  # type: ignore[method-assign]
    shop.run_book("RelayEndpointDisabled", mend="relay endpoint enable")
    shop.configure(handlers=handlers)


@pytest.mark.rare
def test_relay_dead_letters(running_shop: Shop) -> None:
    shop = running_shop
    shop.publish(amount=-5)
    shop.run_book("RelayDeadLetters")
    assert shop.value(shop.target, "select count(*) from orders where amount = 5") == 1
    assert (
        shop.value(
            shop.target,
            # The guide of disabled endpoints leaves replayed ones too, which nobody edited.
            "select original_payload ->> 'amount' from relay.dead_letter_queue"
            " where status = 'replayed' and original_payload is not null",
        )
        == "-5"
    )


@contextmanager
def queue_with_a_message(shop: Shop) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """The queue `mail` with an event, until the end."""
    with psycopg.connect(shop.target, autocommit=True) as conn:
        conn.execute("select relay.declare_queue('mail')")
        shop.publish()
        wait_until(lambda: shop.value(shop.target, "select ready from relay.queue_figures") == 1)
        try:
            yield conn
        finally:
            conn.execute("select relay.drop_queue('mail')")


@pytest.mark.rare
def test_relay_queue_old(running_shop: Shop) -> None:
    with queue_with_a_message(running_shop) as conn:
        conn.execute("select relay.pause_queue('mail')")
        guide = runbook("RelayQueueOld")
        for command in guide[:-1]:
            running_shop.follow(command)
        assert conn.execute("select event_type from relay.take('mail')").fetchone() is not None
        running_shop.follow(guide[-1])


@pytest.mark.rare
def test_relay_queue_dead(running_shop: Shop) -> None:
    with queue_with_a_message(running_shop) as conn:
        conn.execute("select relay.retry('mail', id, attempts + 1) from relay.queue_items")
        conn.execute(
            "select relay.fail('mail', id, attempts + 1, 'no address') from relay.queue_items"
        )
        running_shop.run_book("RelayQueueDead")


@pytest.mark.rare
def test_relay_saga_stuck(running_shop: Shop) -> None:
    with queue_with_a_message(running_shop) as conn:
        conn.execute(
            """
            insert into relay.sagas (id, saga, key, event_id, version, state, entries, step, error)
                overriding system value
                values (1, 'mail', 'A-1', 'e', 1, 'stuck', 0, 'pay', 'undo of step pay: no bank')
            """
        )
        running_shop.run_book("RelaySagaStuck")


@pytest.mark.rare
def test_relay_queue_stopped(running_shop: Shop) -> None:
    """Its `match` is one of a former edition, whose number relay cannot read."""
    huge = '{"payload.x": %s}' % ("9" * 5_001)
    with queue_with_a_message(running_shop) as conn:
        assert conn.execute("select event_type from relay.take('mail')").fetchone() is not None
        conn.execute("update relay.queues set match = %s::jsonb where name = 'mail'", (huge,))
        conn.execute("update relay.queue_revisions set revision = revision + 1")
        running_shop.publish()
        running_shop.run_book("RelayQueueStopped")


@pytest.mark.rare
def test_relay_reader_given_up(running_shop: Shop) -> None:
    with psycopg.connect(running_shop.source, autocommit=True) as conn:
        conn.execute("select relay.declare_reader('billing')")
        try:
            conn.execute("update relay.readers set given_up_at = now() where reader = 'billing'")
            running_shop.run_book("RelayReaderGivenUp")
        finally:
            conn.execute("select relay.drop_reader('billing')")


@pytest.mark.rare
def test_relay_api_failing(running_shop: Shop) -> None:
    """A session holds the table of the tokens."""
    shop, address = running_shop, f"127.0.0.1:{free_port()}"
    shop.configure(api={"listen": address})
    token = shop.bash("relay token create report").stdout.strip()
    shop.more |= {"API": f"http://{address}", "TOKEN": token}
    shop.systemctl("restart")
    shop.wait_healthy()
    with session(shop.source, "report of March") as report:
        report.execute("lock table relay.api_tokens in access exclusive mode")
        shop.run_book("RelayApiFailing")
    # The address is for one process, and another test starts a second one.
    shop.configure(api=None)
    shop.systemctl("restart")


@pytest.mark.rare
def test_relay_schedule_missed(running_shop: Shop) -> None:
    """A schedule that SQL has declared, and relay does not understand."""
    with psycopg.connect(running_shop.source, autocommit=True) as conn:
        declare = "select relay.declare_schedule('nightly', %s, cron => %s)"
        template = Jsonb({"event_type": "cron.nightly", "host_id": str(host(1)), "payload": {}})
        conn.execute(declare, (template, "0 3 99 * *"))
        try:
            guide = runbook("RelayScheduleMissed")
            for command in guide[:-1]:
                running_shop.follow(command)
            conn.execute(declare, (template, "0 3 * * *"))
            running_shop.follow(guide[-1])
        finally:
            conn.execute("select relay.drop_schedule('nightly')")


@pytest.mark.rare
@pytest.mark.long
def test_relay_deferred_old(running_shop: Shop) -> None:
    shop = running_shop
    bad = str(host(77))
    shop.webhook.answers = lambda headers, body: Answer(503 if bad.encode() in body else 204)
    shop.publish(of=host(77))
    wait_until(lambda: shop.value(shop.target, "select count(*) from relay.deferred") == 1)
    shop.publish(of=host(78))

    def mended() -> None:
        shop.webhook.answers = lambda headers, body: Answer()

    shop.mended = mended  # type: ignore[method-assign]
    shop.run_book("RelayDeferredOld", mend="relay deferred run")


@contextmanager
def other_role(shop: Shop) -> Iterator[None]:
    """Another program that reads relay's slot."""
    reader = psycopg.connect(
        make_conninfo(shop.source, application_name="pg_recvlogical"),
        autocommit=True,
        replication="database",
        cursor_factory=psycopg.ClientCursor,
    )
    try:
        options = "(proto_version '1', publication_names 'relay')"
        began = reader.pgconn.exec_(f"START_REPLICATION SLOT relay LOGICAL 0/0 {options}".encode())
        assert began.status == ExecStatus.COPY_BOTH
        yield
    finally:
        reader.close()


@pytest.mark.rare
@pytest.mark.long
def test_relay_polling(running_shop: Shop) -> None:
    shop = running_shop
    shop.systemctl("stop")
    with other_role(shop):
        shop.systemctl("start")
        shop.publish()
        shop.run_book("RelayPolling")


@pytest.mark.rare
@pytest.mark.long
def test_relay_handler_stopped(running_shop: Shop) -> None:
    shop = running_shop
    for number in range(6):
        shop.publish(amount=-1, of=host(number))
    shop.run_book("RelayHandlerStopped")
    with psycopg.connect(shop.target, autocommit=True) as conn:
        conn.execute("update orders set amount = 0 where amount < 0")
        conn.execute("alter table orders add constraint orders_amount_check check (amount >= 0)")


@pytest.mark.rare
def test_relay_source_unreachable(running_shop: Shop) -> None:
    shop = running_shop
    shop.publish()
    with psycopg.connect(shop.target, autocommit=True) as conn:
        conn.execute("alter database shop allow_connections false")
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'shop'"
        )
    shop.run_book("RelaySourceUnreachable")


@pytest.mark.rare
def test_relay_target_unreachable(running_shop: Shop) -> None:
    shop = running_shop
    with psycopg.connect(shop.source, autocommit=True) as conn:
        conn.execute("alter database warehouse allow_connections false")
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'warehouse'"
        )
    shop.publish()
    shop.run_book("RelayTargetUnreachable")


@pytest.mark.rare
def test_an_instance_goes_on_when_the_schema_becomes_newer(running_shop: Shop) -> None:
    """As the guide says of upgrades: only what starts is refused."""
    shop = running_shop
    with psycopg.connect(shop.target, autocommit=True) as conn:
        conn.execute("insert into relay.migrations (name) values ('target/999_later.sql')")
        shop.publish()
        shop.assert_applied()
        refused = shop.bash("relay status")
        assert refused.returncode == 2
        assert "is newer than this program" in refused.stderr
        assert "target/999_later.sql" in refused.stderr
        second = shop.bash("timeout 60 relay run")
        assert second.returncode == 2
        assert "is newer than this program" in second.stderr
        conn.execute("delete from relay.migrations where name = 'target/999_later.sql'")


@pytest.mark.rare
@pytest.mark.long
@pytest.mark.slow
def test_relay_spark_unavailable(running_shop: Shop, tmp_path: Path) -> None:
    """A Java that does not start any more, when the JVM has been killed."""
    from relay.spark.jvm import java_home

    shop = running_shop
    real, broken = java_home(), tmp_path / "broken"
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(
        f'#!/bin/sh\n[ -e {broken} ] && [ "$1" != -version ] && exit 1\nexec {real}/bin/java "$@"\n'
    )
    (home / "bin" / "java").chmod(0o755)
    broken.touch()
    shop.more["JAVA_HOME"] = str(home)
    shop.configure(batch={"inline_max_events": 10}, spark={"master": "local[1]", "eager": True})

    def fill() -> None:
        with psycopg.connect(shop.source, autocommit=True) as conn:
            conn.execute(
                "select relay.publish(%s, null, %s::jsonb)",
                (host(1), psycopg.types.json.Jsonb([event(n) for n in range(50)])),
            )

    shop.systemctl("restart")
    fill()

    def mended() -> None:
        broken.unlink()

    shop.mended = mended  # type: ignore[method-assign]
    steps = runbook("RelaySparkUnavailable")
    for step in steps[:-2]:
        shop.follow(step)
    mended()
    shop.follow(steps[-2])
    log = shop.folder / "relay.log"
    wait_until(lambda: "the Spark session is ready" in log.read_text(), 180)
    fill()
    shop.follow(steps[-1])


def test_each_alert_has_its_runbook() -> None:
    """And nothing else stands among them."""
    section = GUIDE.partition("## Runbooks\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == [
        *(
            "RelayDown",
            "RelayStreamStalled",
            "RelaySlotRetainsWal",
            "RelaySlotLost",
            "RelaySlotRecreated",
            "RelaySinkLagging",
        ),
        *(
            "RelaySinkDown",
            "RelayEndpointDisabled",
            "RelayDeadLetters",
            "RelayQueueOld",
            "RelayQueueDead",
            "RelaySagaStuck",
            "RelayQueueStopped",
            "RelayScheduleMissed",
            "RelayReaderGivenUp",
            "RelayApiFailing",
            "RelayDeferredOld",
            "RelayPolling",
            "RelayHandlerStopped",
        ),
        *("RelaySourceUnreachable", "RelayTargetUnreachable"),
        *("RelayPartFailing", "RelaySparkUnavailable"),
    ]
