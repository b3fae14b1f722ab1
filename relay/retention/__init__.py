"""Removes events from the outbox that every reader is past, and what is settled from relay's own tables."""
