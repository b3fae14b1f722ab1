"""Observes groups: metrics, health and traces of a running relay, and the live view of `relay top`."""
