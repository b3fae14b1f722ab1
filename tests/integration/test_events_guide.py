"""What docs/how-to/event-types.md shows works as it stands there."""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from relay.config.loading import load
from relay.event_types.registry import registered
from tests.outbox import Outbox, event, host, wait_until
from tests.process import ROOT, relay, running

GUIDE = (ROOT / "docs" / "how-to" / "event-types.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture
def shop(outbox: Outbox, tmp_path: Path) -> Path:
    """A folder with the guide's files, and the table that its handler writes to."""
    for text in (*blocks("python"), *blocks("yaml")):
        first = text.partition("\n")[0]
        file = tmp_path / first.removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    for file in tmp_path.glob("*.yaml"):
        config = outbox.config(**yaml.safe_load(file.read_text()))
        file.write_text(yaml.safe_dump(config))
    outbox.conn.execute(
        "create table orders (event_id uuid, total numeric, currency text, lines int)"
    )
    return tmp_path


def test_the_guide(outbox: Outbox, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop)
    config = shop / "relay.yaml"
    with running(config):
        for text in blocks("json"):
            outbox.publish(host(1), json.loads(text))
        odd = {"total": 1, "currency": "EUR", "lines": [{"sku": "x", "price": "a lot"}]}
        outbox.publish(
            host(1), event(event_type="order.placed", payload=odd, metadata={"version": 3})
        )
        wait_until(lambda: bool(outbox.column("select 1 from relay.dead_letter_queue")))
    rows = outbox.conn.execute("select total, currency, lines from orders order by total desc")
    assert rows.fetchall() == [(30, "EUR", 1), (Decimal("20.5"), "SEK", 1)]
    ((number, exception),) = outbox.conn.execute(
        "select event_id::uuid, exception from relay.dead_letter_queue"
    )
    assert exception == blocks("text")[0].replace("EVENT", str(number)).strip()

    events = shop / "shop" / "events.py"
    events.write_text(events.read_text().replace("price: Decimal", "price: Decimal | str"))
    replay, export = (text.split()[1:] for text in blocks("sh"))
    with running(config):
        assert relay(*replay, "--yes", "--config", str(config)).returncode == 0
        wait_until(lambda: outbox.value("select count(*) from orders") == 3)
    assert relay(*export, "--config", str(config), cwd=shop).returncode == 0
    schema = json.loads((shop / "schemas" / "order.placed.json").read_text())
    assert schema["x-version"] == 3


def test_the_types_of_the_guide_are_the_same_in_the_file(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(shop)
    in_code, in_file = (
        registered(load(shop / file).events) for file in ("relay.yaml", "in-file.yaml")
    )
    assert in_code == in_file
    assert registered("shop.elsewhere:registry") == []
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
