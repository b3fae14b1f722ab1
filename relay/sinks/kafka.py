"""Handlers that produce events to Kafka with an idempotent producer; the key is the host, so its events stay in order.

Sources: Apache Kafka documentation, "Producer Configs"; librdkafka, "Idempotent Producer"; CloudEvents, "Kafka Protocol
Binding".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Delivered
from pydantic import SecretStr

from relay.config.handlers import KafkaHandler, KafkaServers
from relay.config.secrets import CallSecret, file_mark, known_text, marks, read
from relay.faults import (
    ConfigurationError,
    Rejected,
    SecretUnavailable,
    Unauthorized,
    Undelivered,
)
from relay.runtime.threads import Thread
from relay.sinks.brokers import Message, Publishing, Sending, SendWindow

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


OF_CREDENTIALS = frozenset(
    {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL}
)
"""Errors of a connection whose credentials or certificates are refused."""
_TOKEN = "oauth_cb"  # noqa: S105 the client's name for a function that returns tokens
_TOKEN_SECONDS = 300.0
"""How long a token is used whose function does not say so: the client asks for another after 80 % of it."""
_PLACEHOLDER = "placeholder"
_SHARED, _SINGLE = "shared", "single"
_RENEW_SECONDS = 5.0
"""How long a producer is kept whose credentials are refused, before another one tries the newest."""
_OF_FILES = (".location", ".keytab", ".file")
"""How settings end that name a file, which the client reads once."""

_Report = tuple[Sending, int, KafkaError | None]


def sink(name: str, settings: KafkaHandler) -> Publishing:
    """The sink of `type: kafka`. Raises ConfigurationError for a setting that the client does not know."""
    return Publishing(name, settings, Kafka(name, settings), settings.key)


class Kafka:
    """One producer whose batches all transactions share, and one that sends what was refused as part of a batch.

    A producer keeps the secrets and certificates that it was made with, so it is replaced when these have changed or
    were refused, as after a fatal error.
    """

    def __init__(self, name: str, settings: KafkaHandler) -> None:
        """Raises ConfigurationError for a setting that the client does not know."""
        self._settings = settings
        self._producers: dict[str, _Producer] = {}
        self._making = asyncio.Lock()
        is_called = any(isinstance(each, CallSecret) for each in settings.conf.values())
        # What the functions return is needed for a connection only.
        known = unconnected_conf(settings) if is_called else client_conf(settings)
        conf = self._conf(known)
        try:
            producer = _Producer(conf, self._marks())
        except KafkaException as error:
            raise ConfigurationError(f"handlers.{name}.conf: {error.args[0].str()}") from None
        if not is_called:
            self._producers[_SHARED] = producer
        self._retired: set[asyncio.Task[None]] = set()
        # A backstop: the producer itself answers within its delivery timeout.
        self._window = SendWindow(
            settings.timeout * 2, awaits_all=True, ordered=settings.is_ordered
        )

    async def close(self) -> None:
        """Close the producers. Messages in flight fail."""
        producers = self._producers.values()
        await asyncio.gather(*(each.close() for each in producers), *self._retired)

    async def send(self, messages: Sequence[Message]) -> None:
        """Produce all messages, those of a key one after the other. Raises Undelivered or Rejected."""
        sending = self._window.sending(messages)
        producer = await self._producer(_SHARED)
        try:
            try:
                await self._window.send(sending, producer.publish)
            except KafkaException as error:
                if error.args[0].code() not in _OF_BATCH:
                    raise
                await self._send_singly(sending.rest)
        except TimeoutError:
            raise producer.undelivered("no acknowledgement in time") from None
        except BufferError:
            raise Undelivered("the producer's queue is full") from None
        except KafkaException as error:
            fault: KafkaError = error.args[0]
            if fault.code() in _REFUSED:
                raise Rejected(fault.name()) from None
            raise producer.undelivered(fault.name()) from None

    async def _send_singly(self, messages: Sequence[Message]) -> None:
        """Produce messages one by one, each a batch of its own, so that an error is the message's."""
        producer = await self._producer(_SINGLE, {"batch.num.messages": 1, "linger.ms": 0})
        for message in messages:
            await self._window.send(self._window.sending([message]), producer.publish)

    async def _producer(
        self, kind: str, more: Mapping[str, Any] = MappingProxyType({})
    ) -> _Producer:
        """The producer of a kind, or the one that replaces it. Raises Unauthorized."""
        present = self._producers.get(kind)
        if present is not None and present.serves(self._marks()):
            return present
        async with self._making:
            present, marks = self._producers.get(kind), self._marks()
            if present is not None and present.serves(marks):
                return present
            try:
                made = await asyncio.to_thread(self._made, more, marks)
            except SecretUnavailable:
                if present is None or present.is_broken:
                    raise
                # The file is being written: the connections that are open serve on.
                return present
            except KafkaException as error:
                if present is None or present.is_broken:
                    raise Unauthorized(f"conf: {error.args[0].str()}") from None
                return present
            self._producers[kind] = made
        if present is not None:
            self._retire(present)
        return made

    def _made(self, more: Mapping[str, Any], marks: Hashable) -> _Producer:
        """A producer with the newest secrets; with a function for tokens this waits for the first one."""
        return _Producer({**self._conf(client_conf(self._settings)), **more}, marks)

    def _conf(self, conf: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "linger.ms": _LINGER_MS,
            **conf,
            "enable.idempotence": True,
            "delivery.timeout.ms": int(self._settings.timeout * 1000),
        }

    def _marks(self) -> Hashable:
        conf = self._settings.conf
        files = [known_text(value) for key, value in conf.items() if key.endswith(_OF_FILES)]
        return marks(conf.values()), tuple(file_mark(each) for each in files if each)

    def _retire(self, producer: _Producer) -> None:
        retired = asyncio.create_task(producer.retire(self._settings.timeout))
        self._retired.add(retired)
        retired.add_done_callback(self._retired.discard)


def client_conf(
    servers: KafkaServers, text_of: Callable[[str, SecretStr], str] = read
) -> dict[str, Any]:
    """The settings of a client for a cluster. Raises SecretUnavailable.

    With a function for tokens this waits for the first one: the client would report a fault only after ten seconds, and
    not which.
    """
    conf: dict[str, Any] = {
        key: text_of(f"conf.{key}", value) for key, value in servers.conf.items()
    }
    conf["bootstrap.servers"] = ",".join(servers.bootstrap)
    if _TOKEN in conf:
        conf[_TOKEN] = partial(_token, servers.conf[_TOKEN])
    return conf


def unconnected_conf(servers: KafkaServers) -> dict[str, Any]:
    """The settings of a client that shows without a connection whether it knows them all."""
    conf = {**client_conf(servers, _text_or_placeholder), "bootstrap.servers": ""}
    return conf | ({_TOKEN: _placeholder_token} if _TOKEN in conf else {})


def _text_or_placeholder(key: str, secret: SecretStr) -> str:
    """The text of a secret; for one that a function returns, a text that shows whether the client knows the setting."""
    return _PLACEHOLDER if isinstance(secret, CallSecret) else read(key, secret)


def _placeholder_token(_: str) -> tuple[str, float]:
    return _PLACEHOLDER, time.time() + _TOKEN_SECONDS


def _token(secret: SecretStr, _: str) -> tuple[str, float]:
    """A token for the client, and until when it is valid, in seconds since 1970. Raises SecretUnavailable."""
    assert isinstance(secret, CallSecret)  # noqa: S101
    text, seconds = secret.lease()
    return text, time.time() + (seconds or _TOKEN_SECONDS)


class _Producer:
    """A producer with a thread that hands its delivery reports to the event loop, many at a time."""

    def __init__(self, conf: dict[str, Any], marks: Hashable) -> None:
        """`marks` are those of its secrets. Raises KafkaException for a setting that the client does not know."""
        self.is_broken = False
        """Whether the producer met a fatal error, after which it delivers nothing."""
        self._marks = marks
        self._made = time.monotonic()
        self._refusal: str | None = None
        self._producer = Producer(
            {**conf, "error_cb": self._note}, logger=logging.getLogger("confluent_kafka")
        )
        self._reports: list[_Report] = []
        self._thread: Thread | None = None
        self._is_closed = self._is_closing = False

    def serves(self, marks: Hashable) -> bool:
        """Whether it can be used while the secrets have these marks."""
        is_refused = self._refusal is not None and time.monotonic() - self._made > _RENEW_SECONDS
        return not (self.is_broken or is_refused) and self._marks == marks

    def undelivered(self, reason: str) -> Undelivered:
        """The fault of a message that was not delivered: the refusal of the credentials, if there was one."""
        if self._refusal is None:
            return Undelivered(reason)
        return Unauthorized(f"{self._refusal}: a broker refuses relay's credentials")

    def _note(self, error: KafkaError) -> None:
        if error.code() in OF_CREDENTIALS:
            self._refusal = error.name()

    async def publish(self, sending: Sending, index: int) -> None:
        if self._is_closed:
            # Nobody would hear of it any more. With other secrets, the next attempt has another producer.
            raise Undelivered("the producer is closed")
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = Thread(target=self._poll, args=(loop,), name="kafka")
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

    async def retire(self, timeout: float) -> None:
        """Close the producer when its messages are answered, after `timeout` seconds at most."""
        ends = time.monotonic() + timeout
        while (
            not self.is_broken
            and self._refusal is None
            and len(self._producer)
            and time.monotonic() < ends
        ):
            await asyncio.sleep(_POLL_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Close the producer. Messages in flight are answered with a fault, and none is taken any more."""
        self._is_closed = True
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
