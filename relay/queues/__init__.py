"""Work queues: which are declared, and how relay fills them from the log."""
