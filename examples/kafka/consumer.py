"""Prints the events of a topic, each once.

python consumer.py SERVERS TOPIC
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from confluent_kafka import Consumer, KafkaException


def events(servers: str, topic: str, group: str = "shop") -> Iterator[dict[str, Any]]:
    """Yield the events of a topic from the group's offsets; it stores an event's offset before it yields the next.

    It yields an event once that relay delivered twice, until it restarts. To recognise events after a restart, store
    the ids in the transaction that does the work, as the receiver of the example `webhook` does.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.offset.store": False,
        }
    )
    consumer.subscribe([topic])
    seen: set[str] = set()
    try:
        while True:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                raise KafkaException(error)
            event = json.loads(message.value() or b"")
            if event["id"] not in seen:
                seen.add(event["id"])
                yield event
            consumer.store_offsets(message)
    finally:
        consumer.close()


if __name__ == "__main__":
    for event in events(sys.argv[1], sys.argv[2]):
        print(json.dumps(event), flush=True)
