"""The section `intake`: brokers whose messages relay publishes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from relay.config.handlers import NatsServers, RabbitmqServer
from relay.config.types import Seconds, Section

_Named = Annotated[str, Field(min_length=1, max_length=255)]


def _nats_name(value: str) -> str:
    if not re.fullmatch(r"[^\s.*>/\\]{1,255}", value):
        raise ValueError("must be a name of NATS, without spaces and . * > / \\")
    return value


_NatsName = Annotated[str, AfterValidator(_nats_name)]


class BrokerSource(Section):
    """The keys of every intake."""

    on_invalid: Literal["stop", "reject"] = "stop"
    """What happens with a message that cannot be published, such as one that its event type does not allow: `stop`: the
    intake stands still at it, and tries again; `reject`: the broker is told so, and the next message comes."""
    timeout: Seconds = 10.0
    """The seconds that the broker has to accept a connection, and to answer."""


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


IntakeSettings = Annotated[NatsSource | RabbitmqSource, Field(discriminator="type")]
INTAKES: dict[str, type[BrokerSource]] = {"nats": NatsSource, "rabbitmq": RabbitmqSource}
"""The settings of each type of intake."""
