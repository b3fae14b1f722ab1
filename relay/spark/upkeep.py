"""When the table of a Spark sink is kept small: after every `upkeep` batches."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from relay.config.handlers import SparkHandler
from relay.spark.descriptions import safe_description
from relay.spark.writers import UpkeepWriter, Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def after_batch(
    name: str,
    handler: SparkHandler,
    writer: Writer,
    number: int,
    session: SparkSession,
    watched: AbstractContextManager[None],
) -> None:
    """Keep the table small, within `watched`, after a batch whose number says so, so that no restart forgets it.

    Nothing is raised, since the batch is written: what fails is logged, and done the next time.
    """
    if handler.upkeep is None or number % handler.upkeep or not isinstance(writer, UpkeepWriter):
        return
    started = time.monotonic()
    try:
        with watched:
            writer.upkeep(session)
    except Exception as error:
        log.warning(
            "cannot keep the table of a sink small, and try again after %d batches: %s: `relay verify %s` tells "
            "whether its files can be read",
            handler.upkeep,
            safe_description(error),
            name,
            extra={"handler": name},
        )
    else:
        log.info(
            "kept the table of a sink small",
            extra={"handler": name, "seconds": round(time.monotonic() - started, 1)},
        )
