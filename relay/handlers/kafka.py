"""Handlers that produce events to Kafka with an idempotent producer; the key is the host, so its events stay in order.

Sources: Apache Kafka documentation, "Producer Configs"; librdkafka, "Idempotent Producer"; CloudEvents, "Kafka Protocol
Binding".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from relay.faults import ConfigurationError, Rejected, Undelivered
from relay.handler_settings import KafkaHandler
from relay.handlers.messages import Message

_REFUSED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.TOPIC_EXCEPTION,
    }
)


class Kafka:
    """One producer, which is replaced after a fatal error."""

    def __init__(self, name: str, settings: KafkaHandler) -> None:
        """Raises ConfigurationError for what the client does not know."""
        self._timeout = settings.timeout
        self._conf: dict[str, Any] = {
            "bootstrap.servers": ",".join(settings.bootstrap),
            "linger.ms": 5,
            **{key: value.get_secret_value() for key, value in settings.conf.items()},
            "enable.idempotence": True,
            "delivery.timeout.ms": int(settings.timeout * 1000),
        }
        self._lock = Lock()
        try:
            self._producer = self._open()
        except KafkaException as error:
            raise ConfigurationError(f"handlers.{name}.conf: {error.args[0].str()}") from None

    def _open(self) -> Producer:
        return Producer(self._conf, logger=logging.getLogger("confluent_kafka"))

    def close(self) -> None:
        """Give up what is on its way."""
        self._producer.purge()

    def send(self, messages: Sequence[Message]) -> None:
        """Produce the messages and wait for all acknowledgements. Raises Undelivered or Rejected."""
        producer = self._producer
        answers: list[KafkaError | None] = []
        try:
            for message in messages:
                producer.produce(
                    message.topic,
                    message.body,
                    message.key,
                    headers=_headers(message),
                    on_delivery=lambda error, _: answers.append(error),
                )
        except BufferError:
            raise Undelivered("the producer's queue is full") from None
        except KafkaException as error:
            answers.append(error.args[0])
        # Nothing is left in the queue for longer than the delivery timeout.
        producer.flush(self._timeout * 2)
        errors = [answer for answer in answers if answer is not None]
        if errors:
            self._fail(producer, errors)
        if len(answers) < len(messages):
            raise Undelivered("no acknowledgement in time")

    def _fail(self, producer: Producer, errors: Sequence[KafkaError]) -> None:
        if any(error.fatal() for error in errors):
            with self._lock:
                if self._producer is producer:
                    self._producer = self._open()
        refused = [error for error in errors if error.code() in _REFUSED]
        if refused:
            raise Rejected(refused[0].name())
        raise Undelivered(errors[0].name())


def _headers(message: Message) -> list[tuple[str, str | bytes | None]]:
    attributes = {"id": message.identity, **message.attributes}
    return [
        ("content-type", message.content_type),
        *((f"ce_{name}", value) for name, value in attributes.items()),
    ]
