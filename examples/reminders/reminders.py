"""Plans the reminders of a campaign, each for its own time, and sends them. Run as many of both as you like."""

from __future__ import annotations

import os
from typing import Any

import psycopg

from relay.client.worker import Message, Queue, Worker

PLAN = """
    select relay.enqueue(
        'reminders', jsonb_build_object('customer', id, 'campaign', %(campaign)s::text), 'reminder.due',
        deliver_at => %(started_at)s::timestamptz + reminded_after)
      from customers
"""

planner = Worker(
    os.environ["DATABASE_URL"],
    Queue(name="campaigns", match={"event_type": "campaign.started"}),
    concurrency=1,
)
sender = Worker(os.environ["DATABASE_URL"], Queue(name="reminders", match=None), concurrency=8)


@planner.handles("campaign.started")
def plan(message: Message, conn: psycopg.Connection[Any]) -> None:
    """Enqueue a reminder for each customer, in the commit that completes the campaign's message: all or none."""
    conn.execute(PLAN, message.payload)


@sender.handles("reminder.due")
def send(message: Message, conn: psycopg.Connection[Any]) -> None:
    """Send a reminder; here, note that it was sent."""
    conn.execute(
        "insert into reminded (customer, campaign) values (%s, %s)",
        (message.payload["customer"], message.payload["campaign"]),
    )
