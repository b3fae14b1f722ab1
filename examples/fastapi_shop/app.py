"""Stores orders, and publishes an event for each in the same transaction."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated
from uuid import UUID

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from relay.client import Event, Outbox

outbox = Outbox()
engine = create_async_engine(os.environ["DATABASE_URL"])
sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    """The tables of this service."""


class Order(Base):
    """An order of one tenant."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[UUID]
    sku: Mapped[str]
    amount: Mapped[Decimal]


class NewOrder(BaseModel):
    """The body of a request."""

    sku: str
    amount: Decimal


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Create the table when the service starts."""
    async with engine.begin() as conn:
        await conn.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def transaction() -> AsyncIterator[AsyncSession]:
    """The transaction of a request, which is committed if the request succeeds, and rolled back otherwise."""
    async with sessions.begin() as session:
        yield session


@app.post("/tenants/{tenant}/orders", status_code=201)
async def submit_order(
    tenant: UUID,
    new: NewOrder,
    session: Annotated[AsyncSession, Depends(transaction, scope="function")],
) -> int:
    """Store an order and publish `order.placed`."""
    order = Order(tenant=tenant, sku=new.sku, amount=new.amount)
    session.add(order)
    await session.flush()
    await outbox.publish_async(
        session, Event("order.placed", aggregate=("Order", order.id), payload=new), host_id=tenant
    )
    if new.amount <= 0:
        # The transaction rolls back the order and its event.
        raise HTTPException(422, "the amount of an order must be positive")
    return order.id
