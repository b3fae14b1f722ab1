"""The management commands of the shop."""
