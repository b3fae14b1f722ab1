"""Handlers that produce events to Kafka with an idempotent producer; the key is the host, so its events stay in order.

Sources: Apache Kafka documentation, "Producer Configs"; librdkafka, "Idempotent Producer"; CloudEvents, "Kafka Protocol
Binding".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Delivered

from relay.config.handlers import KafkaHandler
from relay.faults import ConfigurationError, Rejected, Undelivered
from relay.handlers.messages import Message
from relay.handlers.window import Sending, SendWindow
from relay.threads import Thread

_OF_BATCH = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
    }
)
"""Errors that a broker answers for all messages of a batch, of which one may be at fault, or none alone."""
_REFUSED = _OF_BATCH | {KafkaError.TOPIC_EXCEPTION}
"""Errors of a single message that no retry repairs."""
_POLL_SECONDS = 0.1
"""How long the poll thread blocks, and how long closing waits for it at most."""
_LINGER_MS = 0.5
"""Short, since concurrent deliveries share batches without it, and a single one should not wait."""


_Report = tuple[Sending, int, KafkaError | None]


class Kafka:
    """One producer whose batches all transactions share, and one that sends what was refused as part of a batch.

    After a fatal error a producer is replaced.
    """

    def __init__(self, name: str, settings: KafkaHandler) -> None:
        """Raises ConfigurationError for a setting that the client does not know."""
        self._conf: dict[str, Any] = {
            "bootstrap.servers": ",".join(settings.bootstrap),
            "linger.ms": _LINGER_MS,
            **{key: value.get_secret_value() for key, value in settings.conf.items()},
            "enable.idempotence": True,
            "delivery.timeout.ms": int(settings.timeout * 1000),
        }
        try:
            self._shared = _Producer(self._conf)
        except KafkaException as error:
            raise ConfigurationError(f"handlers.{name}.conf: {error.args[0].str()}") from None
        self._single: _Producer | None = None
        self._retired: set[asyncio.Task[None]] = set()
        # A backstop: the producer itself answers within its delivery timeout.
        self._window = SendWindow(settings.timeout * 2, awaits_all=True)

    async def close(self) -> None:
        """Close the producers. Messages in flight fail."""
        producers = [each for each in (self._shared, self._single) if each is not None]
        await asyncio.gather(*(each.close() for each in producers), *self._retired)

    async def send(self, messages: Sequence[Message]) -> None:
        """Produce all messages, then wait for the acknowledgements. Raises Undelivered or Rejected."""
        if self._shared.is_broken:
            self._retire(self._shared)
            self._shared = _Producer(self._conf)
        sending = self._window.sending(messages)
        try:
            try:
                await self._window.send(sending, self._shared.publish)
            except KafkaException as error:
                if error.args[0].code() not in _OF_BATCH:
                    raise
                await self._send_singly(sending.rest)
        except TimeoutError:
            raise Undelivered("no acknowledgement in time") from None
        except BufferError:
            raise Undelivered("the producer's queue is full") from None
        except KafkaException as error:
            fault: KafkaError = error.args[0]
            kind = Rejected if fault.code() in _REFUSED else Undelivered
            raise kind(fault.name()) from None

    async def _send_singly(self, messages: Sequence[Message]) -> None:
        """Produce messages one by one, each a batch of its own, so that an error is the message's."""
        if self._single is None or self._single.is_broken:
            if self._single is not None:
                self._retire(self._single)
            self._single = _Producer({**self._conf, "batch.num.messages": 1, "linger.ms": 0})
        for message in messages:
            await self._window.send(self._window.sending([message]), self._single.publish)

    def _retire(self, producer: _Producer) -> None:
        retired = asyncio.create_task(producer.close())
        self._retired.add(retired)
        retired.add_done_callback(self._retired.discard)


class _Producer:
    """A producer with a thread that hands its delivery reports to the event loop, many at a time."""

    def __init__(self, conf: dict[str, Any]) -> None:
        """Raises KafkaException for a setting that the client does not know."""
        self.is_broken = False
        """Whether the producer met a fatal error, after which it delivers nothing."""
        self._producer = Producer(conf, logger=logging.getLogger("confluent_kafka"))
        self._reports: list[_Report] = []
        self._thread: Thread | None = None
        self._is_closing = False

    async def publish(self, sending: Sending, index: int) -> None:
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = Thread(target=self._poll, args=(loop,), name="kafka", daemon=True)
            self._thread.start()
        message = sending.messages[index]
        try:
            self._producer.produce(
                message.topic,
                # A tombstone, with which a compacted topic forgets the key.
                None if message.is_null else message.body,
                message.key,
                headers=_headers(message),
                on_delivery=partial(self._reported, sending, index),
            )
        except KafkaException as error:
            if error.args[0].code() in _REFUSED:
                # The client refuses the message itself.
                raise Rejected(error.args[0].name()) from None
            raise

    async def close(self) -> None:
        """Close the producer. Messages in flight are answered with a fault."""
        await asyncio.to_thread(self._producer.purge)
        self._is_closing = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        with suppress(KafkaException):
            self._producer.poll(0)
        _answer(self._reports)
        await asyncio.to_thread(self._producer.close)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._is_closing:
            try:
                # Calls `_reported`, and passes the client's log on.
                self._producer.poll(_POLL_SECONDS)
            except KafkaException:
                # poll raises for a fatal error, after which messages in flight get no report: purge answers them.
                self.is_broken = True
                self._producer.purge(blocking=False)
            if self._reports:
                reports, self._reports = self._reports, []
                try:
                    loop.call_soon_threadsafe(_answer, reports)
                except RuntimeError:
                    # The loop was closed before the producer.
                    return

    def _reported(
        self, sending: Sending, index: int, error: KafkaError | None, _: Delivered
    ) -> None:
        self._reports.append((sending, index, error))


def _answer(reports: list[_Report]) -> None:
    for sending, index, error in reports:
        sending.answer(index, None if error is None else KafkaException(error))


def _headers(message: Message) -> list[tuple[str, str | bytes | None]]:
    attributes = {"id": message.identity, **message.attributes}
    return [
        ("content-type", message.content_type),
        *((f"ce_{name}", value) for name, value in attributes.items()),
        *message.trace.items(),
    ]
