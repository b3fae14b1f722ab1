"""The configuration: its settings, and how they name fields of events, templates and code."""
