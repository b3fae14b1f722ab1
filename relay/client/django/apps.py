"""Configures the Django app."""

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]
    """The app `relay_outbox`. It has no models."""

    name = "relay.client.django"
    label = "relay_outbox"
    verbose_name = "relay outbox"
