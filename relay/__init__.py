"""relay carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once."""

__version__ = "0.1.0"
