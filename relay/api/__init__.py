"""The HTTP API: programs read the log and publish events with a token. The console has an API of its own."""
