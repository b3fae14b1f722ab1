"""The console: pages in a browser by which an operator watches and operates relay, and an HTTP API for the same."""
