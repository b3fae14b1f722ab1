"""The examples of handlers, each run by a `relay run` of its own, as their READMEs say."""

from __future__ import annotations

import importlib.util
import json
import socketserver
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from decimal import Decimal
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import kubernetes_validate
import pytest
import yaml

from relay.config.loading import load
from relay.demo.embedded import free_port
from tests.brokers import TYPE, KafkaCluster
from tests.outbox import Outbox, event, host, wait_until
from tests.process import ROOT, Running, running

EXAMPLES = ROOT / "examples"
RETRY = {"wait": 0.2, "max_wait": 0.4, "jitter": 0.01}
SHORT_INTERVALS = {**RETRY, "defer_after": 0.1}


@contextmanager
def relaying(
    example: str,
    outbox: Outbox,
    tmp_path: Path,
    handlers: dict[str, Any] | None = None,
    **environment: str,
) -> Iterator[Running]:
    """A relay with the example's configuration, but for names and addresses of the test."""
    config = yaml.safe_load((EXAMPLES / example / "relay.yaml").read_text())
    config["source"] |= {"slot": outbox.slot, "publication": outbox.slot}
    for name, changes in (handlers or {}).items():
        config["handlers"][name] |= changes
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(config))
    with running(
        file,
        OUTBOX_DSN=outbox.relay_dsn,
        SIGNING_SECRET="whsec_c2VjcmV0",
        PYTHONPATH=f"{ROOT}:{EXAMPLES / example}",
        **environment,
    ) as process:
        process.wait_said("reading the WAL")
        yield process
        assert process.terminate() == 0


def schema(outbox: Outbox, path: str) -> None:
    outbox.conn.execute((EXAMPLES / path).read_bytes())


def order(number: int, status: str = "placed", **payload: Any) -> dict[str, Any]:
    moment = "2026-11-01T12:00:00+00:00"
    return event(
        event_type=f"order.{status}", aggregate_id=str(number), event_ts=moment, payload=payload
    )


def test_sql_projection(outbox: Outbox, tmp_path: Path) -> None:
    schema(outbox, "sql_projection/projection.sql")
    with relaying("sql_projection", outbox, tmp_path):
        outbox.publish(host(1), order(1, amount="10.50"), order(2, amount=2))
        outbox.publish(host(1), order(1, "paid"))
        outbox.publish(host(2), order(3, amount=1), order(3, "cancelled"))
        outbox.wait_drained()
    rows = outbox.conn.execute("select order_id, status, amount from order_status order by 1")
    assert rows.fetchall() == [
        ("1", "paid", Decimal("10.50")),
        ("2", "placed", 2),
        ("3", "cancelled", 1),
    ]
    rows = outbox.conn.execute("select host_id, day::text, orders, amount from revenue order by 1")
    assert rows.fetchall() == [
        (host(1), "2026-11-01", 2, Decimal("12.50")),
        (host(2), "2026-11-01", 1, 1),
    ]


@pytest.mark.rare
def test_python_handler(outbox: Outbox, tmp_path: Path) -> None:
    """An order waits for its stock, the next of its tenant comes after it, and an unknown article is a dead letter."""
    schema(outbox, "python_handler/stock.sql")
    outbox.conn.execute("insert into stock values ('tea', 3)")
    reserved = "select order_id from reservations order by order_id"
    with relaying("python_handler", outbox, tmp_path, {"stock": {"retry": RETRY}}):
        outbox.publish(host(1), order(1, sku="tea", quantity=2), order(2, sku="tea", quantity=2))
        outbox.publish(host(1), order(3, sku="tea", quantity=1))
        outbox.publish(host(2), order(4, sku="gold", quantity=1))
        outbox.publish(host(2), order(5, sku="tea", quantity=1))
        wait_until(lambda: outbox.column(reserved) == ["5"])
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 2)
        outbox.conn.execute("update stock set free = 5")
        wait_until(lambda: outbox.column(reserved) == ["1", "2", "3", "5"])
    assert outbox.value("select free from stock") == 0
    rows = outbox.conn.execute(
        "select aggregate_id, split_part(exception, chr(10), 1) from relay.dead_letter_queue"
    ).fetchall()
    assert rows == [("4", "LookupError: no such article")]


@contextmanager
def receiver(port: int, tmp_path: Path) -> Iterator[Path]:
    """The example's receiver in a process; the file has what it printed."""
    printed = tmp_path / "printed"
    with printed.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, EXAMPLES / "webhook" / "receiver.py", str(port), tmp_path / "seen.db"],
            stdout=stream,
            env={"SIGNING_SECRET": "whsec_c2VjcmV0"},
        )
    try:
        wait_until(lambda: answers(port))
        yield printed
    finally:
        process.kill()
        process.wait(30)


def answers(port: int) -> bool:
    """Whether the port is open, and an unsigned request is refused."""
    connection = HTTPConnection("localhost", port)
    with closing(connection), suppress(ConnectionError):
        connection.request("POST", "/events", b"{}", {"webhook-id": "1", "webhook-timestamp": "1"})
        return connection.getresponse().status == 401
    return False


def lines(printed: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.read_text().splitlines()]


@contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """An SMTP server that takes every mail: its port, and the Message-ID of each."""
    taken: list[str] = []

    class Session(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 ready\r\n")
            is_data = False
            for line in self.rfile:
                if is_data:
                    if line.lower().startswith(b"message-id:"):
                        taken.append(line.split(b"<")[1].split(b"@")[0].decode())
                    is_data = line.rstrip() != b"."
                    if is_data:
                        continue
                is_data = line.lower().startswith(b"data")
                is_end = line.lower().startswith(b"quit")
                code = b"354" if is_data else b"221" if is_end else b"250"
                self.wfile.write(code + b" ok\r\n")
                if is_end:
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], taken
        server.shutdown()


@pytest.mark.rare
def test_function(outbox: Outbox, tmp_path: Path) -> None:
    """A mail and a note for each order, and a dead letter for one without an address."""
    schema(outbox, "function/mail.sql")
    with (
        mail_server() as (port, taken),
        relaying("function", outbox, tmp_path, SMTP=f"127.0.0.1:{port}"),
    ):
        outbox.publish(host(1), order(1, email="a@shop.example"))
        outbox.publish(host(1), order(2))
        outbox.publish(host(1), order(3, email="b@shop.example"))
        outbox.wait_delivered("mail")
    rows = outbox.conn.execute("select event_id::text, recipient from sent_mails order by 2")
    noted = rows.fetchall()
    assert [recipient for _, recipient in noted] == ["a@shop.example", "b@shop.example"]
    assert taken == [identity for identity, _ in noted]
    dead = "select aggregate_id, split_part(exception, chr(10), 1) from relay.dead_letter_queue"
    assert outbox.conn.execute(dead).fetchall() == [("2", "Fail: the order has no address")]


@pytest.mark.rare
def test_webhook(outbox: Outbox, tmp_path: Path) -> None:
    """The receiver is killed in between, so events wait for it, and each is printed once."""
    port = free_port()
    hook = {"shop": {"url": f"http://localhost:{port}/events", "retry": SHORT_INTERVALS}}
    with relaying("webhook", outbox, tmp_path, hook):
        with receiver(port, tmp_path) as printed:
            outbox.publish(host(1), order(1, sku="tea"))
            wait_until(lambda: len(lines(printed)) == 1)
            # What it has printed and not answered comes again.
            outbox.wait_delivered("shop")
        outbox.publish(host(1), order(1, "paid"))
        with receiver(port, tmp_path) as printed:
            outbox.wait_delivered("shop")
    assert [each["type"] for each in lines(printed)] == ["order.placed", "order.paid"]
    assert [each["data"] for each in lines(printed)] == [{"sku": "tea"}, {}]
    with sqlite3.connect(tmp_path / "seen.db") as seen:
        handled = {identity for (identity,) in seen.execute("select id from handled")}
    assert handled == set(outbox.column("select id::text from outbox_message_t"))


@pytest.mark.rare
def test_kafka(outbox: Outbox, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("consumer", EXAMPLES / "kafka" / "consumer.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with KafkaCluster(tmp_path) as cluster:
        servers = cluster.handler["bootstrap"]
        with relaying("kafka", outbox, tmp_path, {"log": {"bootstrap": servers}}):
            for number in range(6):
                outbox.publish(host(number % 2), order(number, amount=number))
            found = example.events(",".join(servers), f"shop.{TYPE}")
            events = [next(found) for _ in range(6)]
            found.close()
    for tenant in range(2):
        numbers = [each["subject"] for each in events if each["hostid"] == str(host(tenant))]
        assert numbers == [str(number) for number in range(tenant, 6, 2)]


def test_kubernetes_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is one that an API server takes, and relay its configuration."""
    text = (EXAMPLES / "kubernetes_sidecar" / "shop.yaml").read_text()
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)
    config, deployment = documents
    pod = deployment["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in sidecar["volumeMounts"]} == volumes
    assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    for container in (sidecar, *pod["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    monkeypatch.setenv(sidecar["env"][0]["name"], "postgresql://relay@db/app")
    file = tmp_path / "relay.yaml"
    file.write_text(config["data"]["relay.yaml"])
    settings = load(file)
    assert settings.inline_max_events >= settings.batch.max_events


@pytest.mark.parametrize("folder", sorted(EXAMPLES.iterdir()), ids=lambda folder: folder.name)
def test_an_example_says_how_it_runs(folder: Path) -> None:
    """In a README of few lines, to which the project's README leads."""
    text = (folder / "README.md").read_text()
    assert text.startswith("# ")
    assert 3 <= len(text.splitlines()) <= 12
    assert f"](examples/{folder.name})" in (ROOT / "README.md").read_text()
