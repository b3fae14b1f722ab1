"""Spark: the session, the engine of the pipeline, the outbox as a data source, and the sinks that write with Spark."""
