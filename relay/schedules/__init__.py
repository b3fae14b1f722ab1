"""Schedules: events that relay publishes into its own outbox at given times."""
