"""The ```sh blocks of the documentation, run by bash as they stand there, in the situation that the page describes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copytree
from typing import Any

import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb

from relay.model.snapshots import Snapshot
from relay.store import completeness
from relay.store.completeness import Completeness
from tests.console import TOKEN, console_of, served
from tests.outbox import APPEND, Outbox, event, host, initialise, relaying, wait_until
from tests.pages import DOCS, Block, blocks, pages
from tests.process import ROOT
from tests.roles import Role
from tests.shell import needs, run_block
from tests.webhook import Answer, Webhook

Replaced = Mapping[str, str]
"""Texts of a block that stand for others here, such as an address."""
Situation = Callable[[Outbox, Path], AbstractContextManager[Replaced]]

NUMBER, OFFSET = 4711, 184_000
"""The id that dead letters and deferred transactions have on the pages, and the c_offset of an event."""
EVENT = "0198f3a2-8c1e-7d3b-9a55-2f6f0c1d7e90"
"""The id of an event on the pages."""
SCHEDULED = "select count(*) from relay.deferred where retry_at > '2900-01-01'"
REFUSED, BUSY = "order.refused", "order.busy"
STATUS = {REFUSED: 422, BUSY: 503}
OTHER_TESTS = {
    "event-types.md": "test_events_guide.py",
    "publish-django.md": "test_the_blocks_of_the_page_about_django",
}
"""Pages whose blocks are steps of a test of their own."""


@contextmanager
def installed(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """An installed outbox, and a configuration with traces."""
    outbox.config_file(folder / "relay.yaml", observe={"traces": True})
    yield {}


@contextmanager
def several(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """The files of the page, and what it installs in its first steps."""
    for block in blocks((DOCS / "how-to" / "several-outboxes.md").read_text()):
        if block.file is not None:
            (folder / Path(block.file).name).write_text(block.text)
    prepare = 'psql "$SOURCE" -q -f tables.sql\nrelay init -c orders.yaml -c payments.yaml'
    run_block(prepare, folder, **variables(outbox.installer_dsn))
    yield {}


@contextmanager
def with_backup(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """Where a comment says so, the database is dropped and created."""
    outbox.config_file(folder / "relay.yaml")
    outbox.publish(host(1), event(1))
    name = outbox.conn.info.dbname
    psql = "psql dbname=postgres -c"
    drop = f"{psql} 'drop database {name} with (force)'\n"
    create = f"{psql} 'create database {name} owner {Role.INSTALLER}'\n"
    yield {"# later: drop and create the database, then\n": drop + create}
    with psycopg.connect(outbox.superuser_dsn) as conn:
        assert conn.execute("select count(*) from outbox_message_t").fetchone() == (1,)


@contextmanager
def complete(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """A Spark sink that has everything."""
    config: dict[str, Any] = {
        "handlers": {"lake": {"type": "spark", "path": str(folder / "lake"), "format": "delta"}},
        "routes": [{"handlers": ["lake"]}],
    }
    outbox.config_file(folder / "relay.yaml", **config)
    initialise(outbox.settings(**config))
    has_all = Completeness(Snapshot(3, 3), datetime.now(UTC))
    completeness.note(outbox.conn, "default", "lake", Snapshot(3, 3), has_all)
    yield {}


@contextmanager
def with_faults(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """A relay with a handler and two sinks, of which each has had a fault that is over.

    A transaction is dead of the handler `orders`, one of the sink `shop`, which defers a third one. The console runs.
    """
    webhook = Webhook(lambda _, body: Answer(STATUS.get(json.loads(body)["type"], 204)))
    posting = {"type": "http", "url": webhook.url, "retry": {"wait": 300, "max_wait": 300}}
    more: dict[str, Any] = {
        "handlers": {
            "orders": {"type": "sql", "statement": APPEND},
            **dict.fromkeys(("shop", "mail"), posting),
        },
        "routes": [
            {"match": {"event_type": [REFUSED, BUSY]}, "handlers": ["shop"]},
            {"match": {"event_type": "order.placed"}, "handlers": ["orders", "mail"]},
        ],
        "observe": console_of(),
    }
    settings = outbox.settings(**more)
    for table in ("dead_letter_queue", "deferred"):
        outbox.conn.execute(f"alter table relay.{table} alter id restart with {NUMBER}".encode())
    outbox.conn.execute(f"alter sequence relay.offsets restart with {OFFSET}".encode())
    outbox.config_file(folder / "relay.yaml", **more)
    (folder / "console").write_text(TOKEN)
    with webhook, relaying(settings), served(settings) as console:
        outbox.publish(host(1), event(-1))
        wait_until(lambda: dead(outbox) == ["orders"])
        outbox.publish(host(2), event(event_type=REFUSED))
        outbox.publish(host(3), event(event_type=BUSY))
        wait_until(lambda: dead(outbox) == ["orders", "shop"])
        wait_until(lambda: bool(outbox.column("select 1 from relay.deferred")))
        webhook.answers = lambda _, body: Answer(204)
        outbox.conn.execute("alter table projection drop constraint projection_amount_check")
        yield {"http://127.0.0.1:9465": console}


@contextmanager
def with_dead_messages(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """The same, and two messages of a queue that workers have given up."""
    with with_faults(outbox, folder) as replaced:
        outbox.worker.execute("select relay.declare_queue('mail', null)")
        outbox.conn.execute(
            f"alter sequence relay.queue_message_ids restart with {NUMBER - 1}".encode()
        )
        for why in ("no address", "odd"):
            number = outbox.worker.value("select relay.enqueue('mail', '{}')")
            assert outbox.worker.value("select relay.fail('mail', %s, 1, %s)", (number, why))
        yield replaced


@contextmanager
def with_scheduled(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """The same, and an event with a later time of delivery, whose id stands for the one of the page."""
    with with_faults(outbox, folder) as replaced:
        transaction = outbox.publish(host(4), event(deliver_at="2999-01-01"))
        wait_until(lambda: outbox.value(SCHEDULED) == 2)
        find = "select id::text from outbox_message_t where transaction_id = %s"
        yield {**replaced, EVENT: outbox.value(find, (transaction,))}


@contextmanager
def with_sink(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """A sink that had the event of the page, of today, which it gets again after the block."""
    webhook = Webhook(lambda _headers, _body: Answer())
    more: dict[str, Any] = {
        "handlers": {"crm": {"type": "http", "url": webhook.url}},
        "routes": [{"handlers": ["crm"]}],
    }
    outbox.config_file(folder / "relay.yaml", **more)
    hour = datetime.now(UTC).replace(tzinfo=None)
    with webhook, relaying(outbox.settings(**more)):
        outbox.publish(host(1), event(id=EVENT))
        wait_until(lambda: len(webhook.requests) == 1)
        yield {
            f"2026-03-01T{at}:00": f"{hour + timedelta(hours=after):%Y-%m-%dT%H:%M}"
            for at, after in ((12, -1), (13, 1))
        }
        if outbox.value("select count(*) from relay.actions where action = 'sink resend'"):
            wait_until(lambda: len(webhook.requests) == 3)


@contextmanager
def with_endpoints(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """A sink whose endpoints data choose; one is disabled, and nothing is dead of it yet."""
    webhook = Webhook(lambda _headers, _body: Answer())
    hook = {"type": "http", "url": webhook.url + "/{host_id}", "private_addresses": "allow"}
    outbox.config_file(
        folder / "relay.yaml",
        handlers={"tenants": hook},
        routes=[{"handlers": ["tenants"]}],
    )
    outbox.conn.execute(
        """
        insert into relay.endpoints (group_id, sink, endpoint, address, fault, disabled_at)
        values ('default', 'tenants', '6b1f0c9a2d3e4f50', 'https://hooks.example', 'HTTP 410', now())
        """
    )
    with webhook:
        yield {}


@contextmanager
def scheduled(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """The schedule of the page, with no relay that runs."""
    outbox.config_file(folder / "relay.yaml")
    template = {"event_type": "cron.nightly", "host_id": str(host(1)), "payload": {}}
    outbox.conn.execute(
        "select relay.declare_schedule('nightly', cron => '0 3 * * *', publish => %s)",
        (Jsonb(template),),
    )
    yield {}
    assert outbox.column("select event_type from outbox_message_t") == ["cron.nightly"]


@contextmanager
def with_reader(outbox: Outbox, folder: Path) -> Iterator[Replaced]:
    """The reader of the page, with an event before it."""
    outbox.config_file(folder / "relay.yaml")
    outbox.publish(host(1), event(1))
    outbox.reader.execute("select relay.declare_reader('billing', start => 'beginning')")
    yield {}
    assert outbox.column("select name from relay.log_readers") == []


def dead(outbox: Outbox) -> list[str]:
    return outbox.column("select handler from relay.dead_letter_queue order by handler")


SITUATIONS: Mapping[str, Situation] = {
    "attempts.md": with_sink,
    "complete.md": complete,
    "console.md": with_faults,
    "dead-letters.md": with_dead_messages,
    "deferred.md": with_scheduled,
    "endpoints.md": with_endpoints,
    "http-api.md": installed,
    "install.md": installed,
    "local-development.md": installed,
    "operations.md": with_faults,
    "readers.md": with_reader,
    "schedules.md": scheduled,
    "several-outboxes.md": several,
    "tracing.md": installed,
    "upgrade.md": installed,
    "verify.md": complete,
}
"""The situation of a page's blocks that need a database."""
_NEEDS_DATABASE = re.compile(r"^(?:\w+=\S+ )?(?:relay|psql|api|pg_dump) ", re.MULTILINE)


def situation_of(page: Path, block: Block) -> Situation | None:
    """What a block supposes; None where it needs no database. Raises KeyError where nobody has said."""
    if not _NEEDS_DATABASE.search(block.text):
        return None
    return with_backup if "pg_dump" in block.text else SITUATIONS[page.name]


ALL = [
    pytest.param(
        block,
        situation,
        id=f"{page.name}:{block.line}",
        marks=() if situation is None else pytest.mark.rare,
    )
    for page in pages()
    for block in blocks(page.read_text())
    if block.language == "sh" and page.name not in OTHER_TESTS
    for situation in (situation_of(page, block),)
]


def variables(dsn: str) -> dict[str, str]:
    """The connection to the database, as pages and libpq name it."""
    found = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
    return {
        "SOURCE": dsn,
        "PGDATABASE": found["dbname"],
        **{name: found[key] for key, name in names.items() if key in found},
    }


@pytest.mark.parametrize(("block", "situation"), ALL)
def test_a_block_runs(
    block: Block, situation: Situation | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / ".curlrc").write_text("fail\n")
    needs(*(name for name in ("curl", "openssl") if name in block.text))
    text = block.text.replace("/run/secrets", str(folder))
    if situation is None:
        run_block(text, folder)
        return
    outbox: Outbox = request.getfixturevalue("outbox")
    with situation(outbox, folder) as replaced:
        for there, here in replaced.items():
            text = text.replace(there, here)
        # Settings of the server, and a backup of all tables, are the administrator's.
        is_administrators = "alter system" in text or "pg_dump" in text
        dsn = outbox.superuser_dsn if is_administrators else outbox.installer_dsn
        run_block(text, folder, **variables(dsn), RELAY_ADMIN_DSN=outbox.installer_dsn)


@pytest.mark.parametrize(
    "wrong",
    [
        "nomad run relay",
        "helm upgrade --install relay deploy/nothing -f values.yml",
        "install -m 644 deploy/systemd/nothing.service /etc/systemd/system/",
        "systemctl enable --now nothing",
        "relay status --nothing",
        "make nothing",
        "make bench ARGS=nothing",
        "docker run -v x:/etc/relay/relay.yaml:ro relay nothing",
        "docker-compose run --rm nothing",
        "kubectl create secret generic nothing",
        "pip install relay-outbox[nothing]",
    ],
)
def test_a_block_that_is_wrong_fails(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"not found|No such option|cannot run"):
        run_block(wrong, tmp_path)


def test_pages_with_tests_of_their_own_have_them() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    names = {page.name for page in pages()}
    for page, test in OTHER_TESTS.items():
        assert page in names
        assert f"def {test}" in tests or (Path(__file__).parent / test).exists()


def test_the_blocks_of_the_page_about_django(database: str, tmp_path: Path) -> None:
    """The project is examples/django_shop, with the page's settings and its `shop/orders.py`."""
    pytest.importorskip("django", reason="Django is not installed")
    copytree(ROOT / "examples" / "django_shop", tmp_path, dirs_exist_ok=True)
    name = str(conninfo_to_dict(database)["dbname"])
    page = blocks((DOCS / "how-to" / "publish-django.md").read_text())
    files = {block.file: block.text for block in page if block.file is not None}
    (tmp_path / "shop" / "settings.py").write_text(
        "from settings import *\n" + files["shop/settings.py"]
    )
    (tmp_path / "shop" / "orders.py").write_text(files["shop/orders.py"])
    sql = {"type": "sql", "statement": "select 1"}
    (tmp_path / "relay.yaml").write_text(
        yaml.safe_dump(
            {"source": {"dsn": database, "slot": name, "publication": name}, "handlers": {"h": sql}}
        )
    )
    place = "from shop.orders import place; place('6f1f5a3e-3c1c-4f6e-9f5b-0d8f3f1f2a11', 'A-1', 9)"
    used = {**variables(database), "DATABASE_NAME": name, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    for block in page:
        if block.language == "sh":
            run_block(block.text, tmp_path, **used)
    run_block(f'python manage.py shell -c "{place}"', tmp_path, **used)
    with psycopg.connect(database) as conn:
        found = conn.execute("select event_type, payload from outbox_message_t").fetchall()
        assert found == [("order.placed", {"sku": "A-1", "amount": 9})]
