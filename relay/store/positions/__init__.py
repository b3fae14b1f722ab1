"""Positions: of the group's partitions, of its snapshots, and of its sinks."""
