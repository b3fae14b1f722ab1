"""Receives relay's webhooks, and makes an invoice for each order once."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal

from fastapi import FastAPI, HTTPException, Request
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from relay.client.errors import EventInvalid
from relay.client.inbox import Inbox, key

TOLERANCE_SECONDS = 300
"""Older requests are refused: a third party may have recorded them."""
PURGE_SECONDS = 3600

inbox = Inbox("invoices", keep=timedelta(days=30))
secret = base64.b64decode(os.environ["SIGNING_SECRET"].removeprefix("whsec_"))
engine = create_async_engine(os.environ["DATABASE_URL"])
sessions = async_sessionmaker(engine)


def is_genuine(identity: str, timestamp: str, signatures: str, body: bytes) -> bool:
    """Whether the holder of the secret has signed the body recently, see standardwebhooks.com."""
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    digest = hmac.digest(secret, f"{identity}.{timestamp}.".encode() + body, "sha256")
    expected = f"v1,{base64.b64encode(digest).decode()}"
    return any(hmac.compare_digest(expected, each) for each in signatures.split())


async def make_invoice(session: AsyncSession, order: str, amount: Decimal) -> None:
    """Store an invoice, in the session's transaction."""
    await session.execute(
        text("insert into invoices values (:order, :amount)"), {"order": order, "amount": amount}
    )


async def purge() -> None:
    """Delete ids that are older than `keep`, from time to time."""
    while True:
        async with sessions.begin() as session:
            deleted = await inbox.purge_async(session)
        if not deleted:
            await asyncio.sleep(PURGE_SECONDS)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Purge the inbox while the service runs."""
    purging = asyncio.create_task(purge())
    yield
    purging.cancel()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/events", status_code=204)
async def receive(request: Request) -> None:
    """Make the invoice of an order, unless it was made. Without an answer of 2xx relay delivers again."""
    body = await request.body()
    try:
        identity = key(request.headers)
    except EventInvalid as error:
        raise HTTPException(400, str(error)) from error
    timestamp, signatures = (
        request.headers.get(name, "") for name in ("webhook-timestamp", "webhook-signature")
    )
    if not is_genuine(identity, timestamp, signatures, body):
        raise HTTPException(401)
    event = json.loads(body, parse_float=Decimal)
    async with sessions.begin() as session, inbox.once(session, identity) as first:
        if first:
            await make_invoice(session, event["subject"], event["data"]["amount"])
