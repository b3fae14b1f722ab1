"""The slot's stream: a thread reads it over a replication connection, and the service takes whole commits from it."""
