"""What the console and the HTTP API share: the server, bounds of requests, and errors as problems."""
