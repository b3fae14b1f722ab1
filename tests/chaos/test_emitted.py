"""Messages of pg_logical_emit_message, and a relay that is killed: nothing is lost, effects are once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from relay.config.settings import Settings
from tests.integration.test_emitted import AMOUNTS, config, emit, message, shop, webhook
from tests.outbox import Outbox, initialise, wait_until
from tests.process import running
from tests.webhook import Webhook

__all__ = ["shop", "webhook"]


def has_applied(shop: Outbox, more_than: int) -> bool:
    return bool(shop.value("select count(*) > %s from projection", (more_than,)))


@pytest.mark.rare
def test_a_relay_that_is_killed_goes_on(shop: Outbox, webhook: Webhook, tmp_path: Path) -> None:
    file = shop.config_file(tmp_path / "relay.yaml", **config(shop, webhook))
    initialise(Settings(**config(shop, webhook)))
    for first in (0, 40):
        with running(file) as process:
            for number in range(first, first + 40):
                emit(shop, message(number))
            wait_until(partial(has_applied, shop, first))
            process.kill()
    with running(file):
        shop.wait_drained()
        wait_until(lambda: len(webhook.ids()) == 80)
    assert shop.column(AMOUNTS) == list(range(80))
    # At least once in a sink, by the same ids.
    assert set(webhook.ids()) == set(shop.column("select id::text from projection"))
