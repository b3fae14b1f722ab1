"""The examples, run as their READMEs say."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import deltalake
import psycopg
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from fastapi.testclient import TestClient

from relay.client import Event as ClientEvent
from relay.client import Outbox as Publisher
from relay.spark import register
from relay.spark.session import Session
from tests.outbox import Outbox, event, host, wait_until
from tests.process import ROOT, administer, relay, running
from tests.roles import Role
from tests.webhook import Answer, Webhook

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.rare, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "examples"


@pytest.fixture
def spark(spark_session: Session) -> SparkSession:
    session = spark_session.get(timeout=120)
    assert session is not None
    register(session)
    return session


def module(path: str) -> ModuleType:
    """A script of an example, imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def configuration(path: str, outbox: Outbox, **source: Any) -> dict[str, Any]:
    """An example's configuration, for a test's outbox."""
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / path).read_text())
    found["source"] |= {"slot": outbox.slot, "publication": outbox.slot, **source}
    return found


def publish(outbox: Outbox, hour: int, *amounts: str) -> None:
    events = [event(each, event_ts=f"2026-11-01T{hour:02}:30:00+00:00") for each in amounts]
    outbox.publish(host(hour % 3), *events)


def test_revenue_goes_on_from_its_checkpoint(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    example = module("streaming_revenue/revenue.py")
    path = str(tmp_path / "revenue")
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    try:
        publish(outbox, 8, "10.10", "5.05")
        publish(outbox, 9, "1")
        outbox.publish(host(1), event(99, "order.paid", event_ts="2026-11-01T09:00:00+00:00"))
        example.write(spark, outbox.jobs_dsn, path)
        publish(outbox, 9, "2.5")
        publish(outbox, 20, "7")
        example.write(spark, outbox.jobs_dsn, path)
        publish(outbox, 23, "8")
        example.write(spark, outbox.jobs_dsn, path)
        rows = spark.read.parquet(path).orderBy("start").collect()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", str(before))
    assert [(row.start.hour, row.orders, row.amount) for row in rows] == [
        (8, 2, Decimal("15.15")),
        (9, 2, Decimal("3.50")),
        (20, 1, Decimal("7.00")),
    ]


def test_events_are_enriched_once_with_relay_killed(outbox: Outbox, tmp_path: Path) -> None:
    customers = {"customer": ["1", "2"], "country": ["CH", "FR"]}
    (tmp_path / "customers").mkdir()
    pyarrow.parquet.write_table(pa.table(customers), tmp_path / "customers" / "all.parquet")
    config = configuration("delta_enrich/relay.yaml", outbox)
    lake = config["handlers"]["lake"]
    lake |= {"path": str(tmp_path / "orders"), "every": 0.1, "max_events": 500}
    lake["sql"] = lake["sql"].replace("/lake/customers", str(tmp_path / "customers"))
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(config))
    outbox.fill(600, events=3)
    begun = "select coalesce(max(number), 0) from relay.spark_batches"
    for number in (1, 3):
        with running(file, OUTBOX_DSN=outbox.relay_dsn) as service:
            wait_until(lambda: outbox.value(begun) >= number, 120)  # noqa: B023
            service.kill()
    with running(file, OUTBOX_DSN=outbox.relay_dsn) as service:
        outbox.wait_delivered("lake", 120)
        assert service.terminate() == 0
    columns = ["id", "customer", "country", "amount"]
    found = deltalake.DeltaTable(tmp_path / "orders").to_pyarrow_table(columns=columns)
    expected = outbox.conn.execute(
        """
        select id::text, aggregate_id, case aggregate_id when '1' then 'CH' when '2' then 'FR' end,
               (payload->>'amount')::numeric(18, 2)
          from outbox_message_t order by id
        """
    ).fetchall()
    assert [tuple(row.values()) for row in found.sort_by("id").to_pylist()] == expected


def test_a_backfill_and_relay_meet_exactly(
    spark: SparkSession, outbox: Outbox, tmp_path: Path
) -> None:
    """Events are published before the group, between it and the backfill, and while relay runs.

    All is done by who owns the database, and the projection, which the backfill empties.
    """
    outbox.login(Role.INSTALLER).execute((EXAMPLES / "backfill" / "projection.sql").read_bytes())
    config = configuration("backfill/relay.yaml", outbox, slot=f"{outbox.slot}_sales")
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(config))

    def publish_days(first: int, last: int) -> None:
        for day in range(first, last):
            outbox.conn.execute(
                """
                select relay.publish(gen_random_uuid(), null, jsonb_agg(jsonb_build_object(
                    'event_type', 'order.placed', 'aggregate_type', 'Customer', 'aggregate_id', n::text,
                    'event_ts', timestamptz '2026-01-01 12:00+00' + %s * interval '1 day',
                    'payload', jsonb_build_object('amount', n + 0.25))))
                  from generate_series(1, 5) as n
                """,
                (day,),
            )

    publish_days(0, 365)
    assert (
        administer(
            outbox, "init", "--config", str(file), OUTBOX_DSN=outbox.installer_dsn
        ).returncode
        == 0
    )
    publish_days(300, 330)
    shown = relay(
        "offsets", "show", "--config", str(file), "--json", OUTBOX_DSN=outbox.installer_dsn
    )
    (snapshot,) = {each["snapshot"] for each in json.loads(shown.stdout)}
    example = module("backfill/backfill.py")
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        for _ in range(2):
            assert example.backfill(spark, snapshot, outbox.installer_dsn) == 365 * 5
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    with running(file, OUTBOX_DSN=outbox.installer_dsn) as service:
        publish_days(360, 370)
        wait_until(lambda: outbox.value("select sum(orders) from daily_sales") == 405 * 5)
        assert service.terminate() == 0
    differs = """
        select count(*) from daily_sales as s full join (
            select aggregate_id as customer, (event_ts at time zone 'UTC')::date as day, count(*) as orders,
                   sum((payload->>'amount')::numeric) as amount
              from outbox_message_t group by 1, 2) as o using (customer, day)
         where (s.orders, s.amount) is distinct from (o.orders, o.amount)
    """
    assert outbox.value(differs) == 0


def test_notifications(outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dispatchers, one of which is killed: each valid notification is noted as sent once, and no other."""
    folder = EXAMPLES / "notifications"
    failed: set[str] = set()

    def answers(headers: Mapping[str, str], body: bytes) -> Answer:
        text = json.loads(body)["text"]
        if text == "refused":
            return Answer(400)
        if text == "later" and headers["idempotency-key"] not in failed:
            failed.add(headers["idempotency-key"])
            return Answer(503)
        return Answer()

    outbox.login(Role.INSTALLER).execute((folder / "tables.sql").read_bytes())
    config = tmp_path / "relay.yaml"
    config.write_text(yaml.safe_dump(configuration("notifications/relay.yaml", outbox)))
    # The page has one address for relay, the service and its workers: that of who owns the database.
    monkeypatch.setenv("DATABASE_URL", outbox.installer_dsn)
    with Webhook() as provider, ExitStack() as stack:
        provider.answers = answers
        for name in ("EMAIL_PROVIDER", "SMS_PROVIDER"):
            monkeypatch.setenv(name, provider.url)
        assert administer(outbox, "init", "--config", str(config)).returncode == 0
        monkeypatch.syspath_prepend(str(folder))
        stack.callback(sys.modules.pop, "app", None)
        client = stack.enter_context(TestClient(importlib.import_module("app").app))
        service = stack.enter_context(running(config))
        service.wait_said("streaming")
        command = [sys.executable, "-m", "relay", "work", "dispatcher:worker"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        dispatchers = [
            stack.enter_context(subprocess.Popen(command, cwd=tmp_path, env=environment))
            for _ in range(2)
        ]
        for each in dispatchers:
            stack.callback(each.kill)
        wait_until(lambda: outbox.value("select count(*) from relay.queues") == 1)

        def post(text: str, **more: str) -> Any:
            body = {"channel": "email", "to": "a@shop.example", "text": text, **more}
            return client.post(f"/tenants/{host(1)}/notifications", json=body)

        bad = post("text", channel="letter")
        assert bad.status_code == 400
        assert bad.json()["faults"][0]["field"] == "body.channel"
        texts = ["sent"] * 60 + ["later", "refused"]
        accepted = [post(text, channel="sms" if n % 2 else "email") for n, text in enumerate(texts)]
        assert {each.status_code for each in accepted} == {202}
        dispatchers[0].kill()
        ids = [each.json()["id"] for each in accepted]

        def states() -> list[str]:
            return [client.get(f"/notifications/{each}").json()["state"] for each in ids]

        wait_until(lambda: states() == ["sent"] * 61 + ["dead"], 60)
        assert client.get(f"/notifications/{host(9)}").status_code == 404
        dispatchers[1].terminate()
        assert dispatchers[1].wait(20) == 0
    assert sorted(map(str, outbox.column("select id from sent"))) == sorted(ids[:-1])
    assert outbox.column("select error from relay.queue_items") == [
        "Fail: the provider refuses the notification"
    ]


def test_reminders(outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event becomes a message for each customer, once; each is sent when its time has come, and not before."""
    folder = EXAMPLES / "reminders"
    outbox.login(Role.INSTALLER).execute((folder / "tables.sql").read_bytes())
    outbox.conn.execute(
        "insert into customers (email, reminded_after) select 'a@shop.example', after::interval"
        " from unnest('{0,0,1 second,1 hour}'::text[]) as after"
    )
    config = tmp_path / "relay.yaml"
    config.write_text(yaml.safe_dump(configuration("reminders/relay.yaml", outbox)))
    # The page has one address for relay, the service and its workers: that of who owns the database.
    monkeypatch.setenv("DATABASE_URL", outbox.installer_dsn)
    assert administer(outbox, "init", "--config", str(config)).returncode == 0
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    with ExitStack() as stack:
        stack.enter_context(running(config)).wait_said("streaming")
        for name in ("sender", "planner"):
            command = [sys.executable, "-m", "relay", "work", f"reminders:{name}"]
            worker = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, env=environment))
            stack.callback(worker.kill)
        wait_until(lambda: outbox.value("select count(*) from relay.queues") == 2)
        start = (folder / "start.sql").read_bytes()
        outbox.conn.execute(start)
        with pytest.raises(psycopg.errors.UniqueViolation):
            outbox.conn.execute(start)
        wait_until(lambda: outbox.value("select count(*) from reminded") == 3)
    assert outbox.column("select customer from reminded order by customer") == [1, 2, 3]
    assert outbox.value(
        """
        select bool_and(r.at >= (o.payload->>'started_at')::timestamptz + c.reminded_after)
          from reminded as r join customers as c on c.id = r.customer cross join outbox_message_t as o
        """
    )
    left = "select state, queue from relay.queue_items"
    assert outbox.conn.execute(left).fetchall() == [("scheduled", "reminders")]


def test_checkout(outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are killed all the while: each order is shipped and paid once, or as if it had never been."""
    folder = EXAMPLES / "checkout"
    outbox.conn.execute((folder / "tables.sql").read_bytes())
    outbox.conn.execute("insert into stock values ('tea', 10)")
    config = tmp_path / "relay.yaml"
    config.write_text(yaml.safe_dump(configuration("checkout/relay.yaml", outbox)))
    monkeypatch.setenv("DATABASE_URL", outbox.superuser_dsn)
    monkeypatch.setenv("BANK_URL", outbox.superuser_dsn)
    assert administer(outbox, "init", "--config", str(config)).returncode == 0
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "relay", "work", "checkout:worker"]

    def publish(event_type: str, order: int, **payload: str) -> None:
        with psycopg.connect(outbox.superuser_dsn) as conn:
            Publisher().publish(
                conn,
                ClientEvent(
                    event_type, ("Order", order), payload={"order_id": str(order), **payload}
                ),
                host_id=host(1),
            )

    def ended() -> int:
        return int(outbox.value("select count(*) from relay.sagas where ended_at is not null"))

    with ExitStack() as stack:
        stack.enter_context(running(config)).wait_said("streaming")
        worker = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, env=environment))
        stack.callback(worker.kill)
        wait_until(lambda: outbox.value("select count(*) from relay.queues") == 1)
        for order in range(1, 11):
            amount = "1200" if order % 5 == 0 else "12.50"
            publish("order.placed", order, item="tea", amount=amount)
        for order in range(1, 11):
            publish("order.cancelled" if order == 1 else "parcel.packed", order)
            if order % 3 == 0:
                worker.kill()
                worker.wait()
                worker = stack.enter_context(
                    subprocess.Popen(command, cwd=tmp_path, env=environment)
                )
                stack.callback(worker.kill)
        wait_until(lambda: ended() == 10)
    shipped = ["2", "3", "4", "6", "7", "8", "9"]
    assert sorted(outbox.column("select order_id from parcels")) == shipped
    assert sorted(outbox.column("select order_id from reservations")) == shipped
    assert outbox.value("select pieces from stock") == 3
    payments = outbox.column(
        "select order_id || ' ' || amount from payments order by amount, order_id"
    )
    assert payments == ["1 -12.50", *(f"{order} 12.50" for order in ["1", *shipped])]
