"""Delivers to sinks: each has a position in the log, a worker and a bounded buffer, so that none slows another."""
