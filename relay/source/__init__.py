"""Where events come from: the replication slot, and what its stream means."""
