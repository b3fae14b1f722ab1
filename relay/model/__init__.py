"""What flows through relay: events, business transactions as columns, batches, and how rows are encoded."""
