"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]
    """Creates the table; the outbox must exist, because orders publish events."""

    initial = True
    dependencies = (("relay_outbox", "0001_outbox"),)
    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tenant", models.UUIDField()),
                ("sku", models.CharField(max_length=40)),
                ("amount", models.DecimalField(decimal_places=2, max_digits=12)),
            ],
        ),
    )
