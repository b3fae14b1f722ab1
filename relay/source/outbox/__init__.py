"""The outbox as a table: its columns, index and triggers, and how its rows are read between two snapshots."""
