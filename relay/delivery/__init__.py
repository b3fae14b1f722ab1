"""Sinks at work: each has a cursor in the log, a worker and a bounded buffer, so that none feels another."""
