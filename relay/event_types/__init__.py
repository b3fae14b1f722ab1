"""Event types, their versions, and the upcasting of events to the current version."""
