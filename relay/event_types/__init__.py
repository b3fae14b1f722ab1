"""Types of events, their versions, and how an event of an older version becomes one of the current version."""
