"""The sink of `type: http` that posts the events of many transactions in one request (`each: batch`).

The body is a JSON array of CloudEvents. The answer may name the events that failed, as functions of AWS Lambda do:
`{"batchItemFailures": [{"itemIdentifier": "<id>"}]}`.

Sources: CloudEvents specification 1.0.2, "JSON Batch Format"; AWS Lambda developer guide, "Implementing partial batch
responses".
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NoReturn

from aiohttp import ClientResponse
from pydantic_core import from_json

from relay.config.handlers import HttpHandler
from relay.faults import DestinationRefused, Rejected, Undelivered
from relay.model.events import Transaction
from relay.sinks import Again, Target, cloudevents
from relay.sinks.http import Http, HttpAddress

_ANSWER_BYTES = 2_000_000
"""The longest answer that is read: that is room for each id of the largest batch."""
_FAILURES = "batchItemFailures"
_TOO_MANY_REQUESTS = 429
_LEAST_SECONDS = 0.1
"""What an endpoint asks for that limits the rate and does not say for how long."""


def sink(name: str, settings: HttpHandler, target: Target | None) -> HttpBatches:
    """The sink of `type: http` with `batch`. Raises ConfigurationError as that of `relay.sinks.http`."""
    return HttpBatches(name, settings)


class HttpBatches(Http):
    """Posts the events of many transactions in one request; any 2xx confirms all but what its body names."""

    _read_bytes = _kept_bytes = _ANSWER_BYTES + 1

    async def deliver_batch(
        self, transactions: Sequence[Transaction]
    ) -> Sequence[Exception | None]:
        """Post the events, in order. Raises what a response that is no 2xx means, for all transactions.

        While one of them has an event that cannot be sent, the others are not.
        """
        source, as_text = self._settings.source, self._settings.payload == "text"
        parts: list[bytes] = []
        faults: dict[int, Exception] = {}
        owners: dict[str, list[int]] = defaultdict(list)
        for index, transaction in enumerate(transactions):
            try:
                events = list(transaction.events)
                parts.append(cloudevents.batch(events, source, as_text)[1:-1])
            except Exception as error:
                faults[index] = error
                continue
            for event in events:
                owners[cloudevents.identity(event)].append(index)
        if faults:
            return [faults.get(index) or Again() for index in range(len(transactions))]
        # Another one for other events, and after each attempt that has failed: a receiver that repeats its answer to a
        # key would name the same failures for ever.
        lines = [f"{name} {transactions[owners[name][0]].attempt}\n" for name in owners]
        identity = f"batch-{sha256(''.join(lines).encode()).hexdigest()[:32]}"
        body = b"[%s]" % b",".join(parts)
        answer = await self._post(
            self._destination, identity, {"content-type": cloudevents.BATCH}, body
        )
        results: list[Exception | None] = [None] * len(transactions)
        for name, status in _failures(answer):
            if name not in owners:
                raise Undelivered(
                    f"{_FAILURES}: the answer names an event that is not of the batch"
                )
            for index in owners[name]:
                results[index] = self._named(status)
        return results

    def _refuse(self, to: HttpAddress, response: ClientResponse, start: bytes) -> NoReturn:
        try:
            super()._refuse(to, response, start)
        except Undelivered as fault:
            if response.status == _TOO_MANY_REQUESTS and not fault.after:
                # No event is the culprit, and halves of the request would be more requests.
                fault.after = _LEAST_SECONDS
            raise

    def _named(self, status: int | None) -> Exception:
        """What it means that the answer names an event, with a status of its own where it gives one."""
        if status is None:
            return Undelivered("the endpoint names it as failed")
        reason = f"the endpoint names it as failed with HTTP {status}"
        action = self._settings.action_for(status)
        if action == "dead":
            return Rejected(reason)
        return DestinationRefused(reason) if action == "stop" else Undelivered(reason)


def _failures(answer: bytearray) -> list[tuple[str, int | None]]:
    """The events that an answer names, each with its status if it has one. Raises Undelivered where that is unclear.

    An answer that is no JSON object names none.
    """
    if len(answer) > _ANSWER_BYTES:
        raise Undelivered(f"the answer is longer than {_ANSWER_BYTES:,} bytes")
    # Some servers begin with a byte order mark.
    text = bytes(answer).removeprefix(BOM_UTF8)
    if not text.lstrip().startswith(b"{"):
        return []
    try:
        found: Any = from_json(text).get(_FAILURES) or []
        return [_failure(each) for each in found]
    except (ValueError, TypeError, AttributeError):
        raise Undelivered(
            f"the answer cannot be read: {_FAILURES} is a list of objects with an itemIdentifier"
        ) from None


def _failure(item: Any) -> tuple[str, int | None]:
    name, status = item.get("itemIdentifier"), item.get("status")
    if not name or not isinstance(name, str):
        raise ValueError
    is_status = isinstance(status, int) and 300 <= status < 600
    return name, status if is_status else None
