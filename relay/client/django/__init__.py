"""A Django app whose migration installs the outbox: add `relay.client.django` to INSTALLED_APPS."""
