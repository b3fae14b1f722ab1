"""The data that flows through relay: events, business transactions as columns, batches, and the encoding of rows."""
