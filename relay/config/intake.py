"""The section `intake`: brokers whose messages relay publishes."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from relay.config.handlers import KafkaServers, NatsServers, RabbitmqServer
from relay.config.types import Seconds, Section

_Named = Annotated[str, Field(min_length=1, max_length=255)]


def _nats_name(value: str) -> str:
    if not re.fullmatch(r"[^\s.*>/\\]{1,255}", value):
        raise ValueError("must be a name of NATS, without spaces and . * > / \\")
    return value


_NatsName = Annotated[str, AfterValidator(_nats_name)]


def _kafka_topic(value: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,249}", value, re.ASCII) or value in (".", ".."):
        raise ValueError("must be a topic of Kafka: up to 249 letters, digits and . _ -")
    return value


class BrokerSource(Section):
    """The keys of every intake."""

    on_invalid: Literal["stop", "reject"] = "stop"
    """What happens with a message that cannot be published, such as one that its event type does not allow: `stop`: the
    intake stands still at it, and tries again; `reject`: the broker is told so, and the next message comes."""
    timeout: Seconds = 10.0
    """The seconds that the broker has to accept a connection, and to answer."""


class KafkaSource(KafkaServers, BrokerSource):
    """The messages of topics of Kafka; one that is rejected stays in its topic, and the next one comes."""

    SET_BY_RELAY: ClassVar[dict[str, str]] = {
        **KafkaServers.SET_BY_RELAY,
        "group.id": "set the key group",
        **dict.fromkeys(
            ("enable.auto.commit", "enable.auto.offset.store"),
            "offsets are committed after the events: remove it",
        ),
        "enable.partition.eof": "remove it",
    }

    type: Literal["kafka"]
    topics: Annotated[list[Annotated[str, AfterValidator(_kafka_topic)]], Field(min_length=1)]
    """The topics, which exist."""
    group: _Named
    """The consumer group, which keeps the offsets."""


class NatsSource(NatsServers, BrokerSource):
    """The messages of a stream of NATS JetStream; one that is rejected is ended with `term`."""

    type: Literal["nats"]
    stream: _NatsName
    """The stream."""
    consumer: _NatsName
    """The durable consumer, which keeps the position; relay makes it if there is none."""
    subject: _Named | None = None
    """The subject of the messages of a consumer that relay makes, which may have wildcards; null: all of the stream."""


class RabbitmqSource(RabbitmqServer, BrokerSource):
    """The messages of a queue of RabbitMQ; one that is rejected goes to the queue's dead-letter exchange, if any."""

    type: Literal["rabbitmq"]
    queue: _Named
    """The queue, which exists."""


IntakeSettings = Annotated[KafkaSource | NatsSource | RabbitmqSource, Field(discriminator="type")]
INTAKES: dict[str, type[BrokerSource]] = {
    "kafka": KafkaSource,
    "nats": NatsSource,
    "rabbitmq": RabbitmqSource,
}
"""The settings of each type of intake."""
