"""An order, which is never without its event."""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.db import connection, models, transaction

from relay.client import Event, Outbox

outbox = Outbox()


class Order(models.Model):  # type: ignore[misc]
    """An order of one tenant."""

    tenant = models.UUIDField()
    sku = models.CharField(max_length=40)
    amount = models.DecimalField(max_digits=12, decimal_places=2)

    @classmethod
    def index(cls, tenant: uuid.UUID, sku: str, amount: Decimal) -> Order:
        """Store an order and publish that it was placed."""
        with transaction.atomic():
            order: Order = cls.objects.create(tenant=tenant, sku=sku, amount=amount)
            placed = Event(
                "order.placed",
                aggregate=("Order", order.pk),
                payload={"sku": sku, "amount": amount},
            )
            outbox.publish(connection, placed, host_id=tenant)
            if amount <= 0:
                # Neither the order nor its event will ever be seen.
                raise ValueError("an order costs something")
        return order
