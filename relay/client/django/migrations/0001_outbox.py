"""Installs relay's own outbox."""

from django.db import migrations

from relay.client import schema


class Migration(migrations.Migration):  # type: ignore[misc]
    """The scripts of `relay init` for the source, without publication and slot, which only relay needs."""

    initial = True
    operations = (migrations.RunSQL(schema.install(), schema.remove()),)
