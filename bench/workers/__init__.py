"""Programs that run a peer, in the benchmark's own environment: they import nothing of relay."""
