"""The console: what an operator sees and does in a browser, and the same as an HTTP API."""
