"""Sends notifications through the providers of mail and SMS. Run as many as you like."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg

from relay import Fail
from relay.client.worker import Message, Queue, Worker

PROVIDERS = {"email": os.environ["EMAIL_PROVIDER"], "sms": os.environ["SMS_PROVIDER"]}

worker = Worker(
    os.environ["DATABASE_URL"],
    Queue(
        name="notifications", match={"event_type": "notification.requested"}, attempts=8, backoff=1
    ),
    concurrency=8,
)


@worker.handles("notification.requested")
def send(message: Message, conn: psycopg.Connection[Any]) -> None:
    """Send a notification, and note that in the commit that completes the message."""
    request = Request(  # noqa: S310
        PROVIDERS[message.payload["channel"]],
        json.dumps({"to": message.payload["to"], "text": message.payload["text"]}).encode(),
        # If this process dies before its commit, another one sends again: the provider knows it by its id.
        {"content-type": "application/json", "idempotency-key": message.event_id},
    )
    try:
        with urlopen(request, timeout=10):  # noqa: S310
            pass
    except HTTPError as error:
        if error.code == 400:
            raise Fail("the provider refuses the notification") from error
        raise
    conn.execute(
        "insert into sent (id, attempt) values (%s, %s)", (message.event_id, message.attempt)
    )
