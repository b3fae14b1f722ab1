"""`manage.py place TENANT SKU AMOUNT`."""

from __future__ import annotations

import uuid
from argparse import ArgumentParser
from decimal import Decimal

from django.core.management.base import BaseCommand

from shop.models import Order  # type: ignore[import-not-found]


class Command(BaseCommand):  # type: ignore[misc]
    """Places one order."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the command's arguments."""
        parser.add_argument("tenant", type=uuid.UUID)
        parser.add_argument("sku")
        parser.add_argument("amount", type=Decimal)

    def handle(self, tenant: uuid.UUID, sku: str, amount: Decimal, **_: object) -> None:
        """Place the order, and print its number."""
        self.stdout.write(str(Order.submit(tenant, sku, amount).pk))
