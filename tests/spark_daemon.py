"""The daemon of Python workers of the tests' Spark session: a worker that it forks has imported what its task needs.

Spark ends workers that are idle, and starts one for each plan of `format("outbox")`:
1.4 s of CPU each, most of it imports.
"""

from __future__ import annotations

import gc
import runpy
import sys

_MODULES = (
    *("pandas", "pyarrow", "pyspark.worker", "pyspark.sql.worker.utils", "pyspark.sql.functions"),
    *("relay.spark.executor", "relay.spark.data_source", "relay.spark.sink_worker"),
)
"""What most tasks import."""

if __name__ == "__main__":
    for name in (*_MODULES, *sys.argv[1:2]):
        __import__(name)
    # The collector of a worker leaves these objects, and so their memory stays shared.
    gc.collect()
    gc.freeze()
    runpy.run_module("relay.spark.daemon", run_name="__main__")
