"""An order, which is committed with its event."""

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
    def submit(cls, tenant: uuid.UUID, sku: str, amount: Decimal) -> Order:
        """Store an order and publish `order.placed`."""
        with transaction.atomic():
            order: Order = cls.objects.create(tenant=tenant, sku=sku, amount=amount)
            placed = Event(
                "order.placed",
                aggregate=("Order", order.pk),
                payload={"sku": sku, "amount": amount},
            )
            outbox.publish(connection, placed, host_id=tenant)
            if amount <= 0:
                # The transaction rolls back the order and its event.
                raise ValueError("the amount of an order must be positive")
        return order
