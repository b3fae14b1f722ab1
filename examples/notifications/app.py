"""Accepts requests for notifications, and says what has become of each."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal
from uuid import UUID

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool
from pydantic import BaseModel, Field

from relay.client import Event, Outbox

outbox = Outbox()
pool = ConnectionPool(os.environ["DATABASE_URL"], open=False)

STATE = """
    select case when s.id is not null then 'sent' else coalesce(q.state, 'accepted') end as state,
           q.attempts, q.error, s.sent_at
      from outbox_message_t as o
      left join sent as s on s.id = o.id
      left join relay.queue_items as q on q.event_id = o.id::text and q.queue = 'notifications'
     where o.id = %s
"""


class Notification(BaseModel):
    """The body of a request."""

    channel: Literal["email", "sms"]
    to: str = Field(min_length=3)
    text: str = Field(min_length=1, max_length=1000)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Open the connections while the service runs."""
    with pool:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(RequestValidationError)
async def refuse(_: Request, error: RequestValidationError) -> JSONResponse:
    """Answer 400 with the path of each fault."""
    faults = [
        {"field": ".".join(map(str, each["loc"])), "fault": each["msg"]} for each in error.errors()
    ]
    return JSONResponse({"faults": faults}, 400)


@app.post("/tenants/{tenant}/notifications", status_code=202)
def accept(tenant: UUID, notification: Notification) -> dict[str, Any]:
    """Store a valid request; whoever sends it takes it from the queue."""
    event = Event("notification.requested", payload=notification)
    with pool.connection() as conn:
        outbox.publish(conn, event, host_id=tenant)
    return {"id": event.id}


@app.get("/notifications/{id}")
def state(id: UUID) -> dict[str, Any]:
    """Say whether a notification is accepted, enqueued, in a retry, dead or sent."""
    with pool.connection() as conn, conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(STATE, (id,)).fetchone()
    if found is None:
        raise HTTPException(404, "there is no such notification")
    return found
