"""Reads events from the source: the replication stream, polling, and recovery of a lost slot."""
