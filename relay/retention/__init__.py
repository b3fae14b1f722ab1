"""Removes events that every reader is past from the outbox, and old history from relay's own tables."""
