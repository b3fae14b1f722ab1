"""Publishes business transactions from JSON, or generated ones: `relay publish`."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from relay.admin import right_to_publish
from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX
from relay.faults import ConfigurationError, first_line
from relay.runtime.reporting import ProgressReport, silent
from relay.store.connections import Connection

_IDS = ("host_id", "user_id", "transaction_id")
_REQUIRED = ("host_id", "events")
_KNOWN = frozenset({"host_id", "user_id", "events", "transaction_id"})
_OF_EVENTS = frozenset(
    {"id", "aggregate_id", "aggregate_version", "aggregate_type", "event_type", "event_ts"}
    | {"payload", "metadata", "deliver_at"}
)
"""The keys that `relay.publish` reads; it ignores others, such as a misspelled deliver_at."""


@dataclass(frozen=True, slots=True)
class PublishCall:
    """The arguments of `relay.publish`."""

    host_id: str
    user_id: str | None
    events: list[dict[str, Any]]
    transaction_id: str | None = None


def parse(text: str, origin: str) -> list[PublishCall]:
    """Read one JSON object, an array of objects, or one object on each line.

    Raises ConfigurationError, which names the transaction and the fault.
    """
    return [
        _call(item, f"{origin}: transaction {n}")
        for n, item in enumerate(_items(text, origin), start=1)
    ]


def _items(text: str, origin: str) -> list[Any]:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if len(lines) > 1 and _is_json(lines[0][1]):
        return [_loads(line, origin, n) for n, line in lines]
    if not lines:
        return []
    whole = _loads(text, origin, 1)
    return whole if isinstance(whole, list) else [whole]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _loads(text: str, origin: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ConfigurationError(
            f"{origin}:{line}: is not JSON: {error.msg} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{origin}:{first_line}: cannot be read: {type(error).__name__}"
        ) from None


def _call(item: Any, origin: str) -> PublishCall:
    if not isinstance(item, dict):
        raise ConfigurationError(f"{origin}: must be an object with host_id and events")
    for key in _REQUIRED:
        if key not in item:
            raise ConfigurationError(f"{origin}: {key} is missing")
    _require_known(item, _KNOWN, origin)
    for key in _IDS:
        if not _is_id(item.get(key), optional=key != "host_id"):
            raise ConfigurationError(f"{origin}: {key} must be a UUID")
    if not isinstance(item["events"], list) or not item["events"]:
        raise ConfigurationError(f"{origin}: events must be an array of at least one event")
    for number, event in enumerate(item["events"], start=1):
        _require_known(event, _OF_EVENTS, f"{origin}: event {number}")
    return PublishCall(
        item["host_id"], item.get("user_id"), item["events"], item.get("transaction_id")
    )


def _require_known(item: Any, known: frozenset[str], origin: str) -> None:
    if not isinstance(item, dict):
        raise ConfigurationError(f"{origin}: must be an object")
    unknown = sorted(set(item) - known)
    if unknown:
        raise ConfigurationError(
            f"{origin}: {unknown[0]} is not a key; the keys are {', '.join(sorted(known))}"
        )


def _is_id(value: Any, optional: bool) -> bool:
    if value is None:
        return optional
    try:
        uuid.UUID(value)
    except (ValueError, AttributeError, TypeError):
        return False
    return True


def require_own_outbox(settings: Settings) -> None:
    """Raise ConfigurationError unless the outbox is relay's own, the only one into which `relay.publish` inserts."""
    if settings.source.message_prefix is not None:
        raise ConfigurationError(
            "source.message_prefix: `relay publish` and relay.publish write to a table: publish with "
            f"pg_logical_emit_message(true, '{settings.source.message_prefix}', …)"
        )
    if not settings.source.owns_table:
        raise ConfigurationError(
            f"source.table: `relay publish` and relay.publish write to {OWN_OUTBOX} only: insert into "
            f"{settings.source.table} with your own statements, or remove source.table and run `relay init`"
        )


def publish(
    conn: Connection,
    transactions: Iterable[PublishCall],
    report: ProgressReport = silent,
    total: int | None = None,
) -> tuple[int, int]:
    """Publish each call in its own database transaction; returns the numbers of transactions and events.

    `report` receives how many transactions of `total` are published. The connection must be in autocommit mode. Raises
    ConfigurationError if the database refuses a transaction, or its role may not publish.
    """
    right_to_publish.require(conn, "relay publish")
    published = events = 0
    for business in transactions:
        try:
            conn.execute(
                "select relay.publish(%s::uuid, %s::uuid, %s::jsonb, %s::uuid)",
                (
                    business.host_id,
                    business.user_id,
                    json.dumps(business.events),
                    business.transaction_id,
                ),
            )
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise ConfigurationError(
                f"transaction {published + 1}: {first_line(error)}: "
                f"{published} transactions before it are published"
            ) from None
        published += 1
        events += len(business.events)
        report("publishing transactions", published, total)
    return published, events


_NOTES = (
    "gift wrap",
    "leave at the door",
    "second floor",
    "call on arrival",
    "no substitutes",
    "fragile",
)
_CUSTOMERS = 1_000


def business_transactions(
    count: int, hosts: int = 8, seed: int | None = None
) -> Iterator[PublishCall]:
    """Generate orders of a shop with several tenants: each is placed, paid and shipped in two to eight events."""
    chance = random.Random(seed)  # noqa: S311
    tenants = [uuid.UUID(int=chance.getrandbits(128), version=4) for _ in range(hosts)]
    for _ in range(count):
        yield _order(chance, str(chance.choice(tenants)))


def _order(chance: random.Random, host: str) -> PublishCall:
    order = str(uuid.UUID(int=chance.getrandbits(128), version=4))
    lines: list[dict[str, Any]] = [
        {
            "sku": f"SKU-{chance.randrange(10_000):05}",
            "quantity": chance.randint(1, 5),
            "price": _price(chance),
        }
        for _ in range(chance.randint(1, 4))
    ]
    total = round(sum(line["quantity"] * line["price"] for line in lines), 2)
    customer = chance.randrange(_CUSTOMERS)
    events = [
        _event("order.placed", "Order", order, 1, order=order, customer=customer, amount=total)
    ]
    for version, line in enumerate(lines, start=2):
        amount = round(line["quantity"] * line["price"], 2)
        events.append(_event("order.line_added", "Order", order, version, **line, amount=amount))
    if chance.random() < 0.8:
        events.append(_event("payment.captured", "Payment", order, 1, order=order, amount=total))
    if chance.random() < 0.5:
        note = chance.choice(_NOTES)
        events.append(
            _event(
                "order.shipped", "Order", order, len(lines) + 2, order=order, amount=0, note=note
            )
        )
    return PublishCall(host, str(uuid.UUID(int=customer + 1)), events)


def _price(chance: random.Random) -> float:
    return round(chance.uniform(1, 200), 2)


def _event(
    event_type: str, aggregate_type: str, aggregate: str, version: int, **payload: Any
) -> dict[str, Any]:
    return {
        "event_type": event_type,
        "aggregate_type": aggregate_type,
        "aggregate_id": aggregate,
        "aggregate_version": version,
        "payload": payload,
        "metadata": {"source": "relay publish --generate"},
    }
