"""Gives deferred transactions the ordering keys of a configuration that has changed.

Their rows have the keys that `order_by` gave them when they were deferred. New transactions have those of the current
configuration, so they would pass the ones before them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from relay.config.effects import Effects
from relay.config.settings import Settings
from relay.pipeline.deferral import DeferralRules
from relay.pipeline.routing import BatchRouter
from relay.store import deferred
from relay.store.connections import Connection
from relay.store.deferred import due as deferred_due

log = logging.getLogger(__name__)

_AT_ONCE = 1_000


def rekey(settings: Settings, conn: Connection, former: Mapping[str, str]) -> None:
    """Compute the keys of deferred transactions again where the configuration orders by others than before.

    `former` are the effects of the former configuration. In the current database transaction. Raises psycopg.Error, and
    Unrouted as `BatchRouter.route` does.
    """
    for sink in Effects.of(settings).reordered(former):
        if not sink:
            # A retry of the target's transactions may be under way in another instance.
            deferred.lock(conn, settings.group)
        count = _rekey(settings, conn, sink)
        if count:
            log.info(
                "deferred transactions have new ordering keys",
                extra={"sink": sink, "transactions": count},
            )


def _rekey(settings: Settings, conn: Connection, sink: str) -> int:
    limits = settings.batch
    router = BatchRouter(settings)
    rules = DeferralRules(settings, router)
    count = last = 0
    while rows := deferred_due.stored(conn, settings.group, sink, last, _AT_ONCE):
        found = deferred_due.transactions(conn, rows, limits.max_bytes, limits.spool_directory)
        if sink:
            keys = [rules.delivery_keys(found.part(n, n + 1), sink) for n in range(len(rows))]
        else:
            assigned = router.route(found)
            keys = [rules.keys(assigned.part(n, n + 1)) for n in range(len(rows))]
        deferred.set_keys(conn, {row.id: each for row, each in zip(rows, keys, strict=True)})
        last = rows[-1].id
        count += len(rows)
    if count:
        deferred.hold_set_keys(conn, settings.group, sink)
    return count
