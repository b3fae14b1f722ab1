"""What the bytes of the stream mean: messages of pgoutput become commits, grouped by transaction. No I/O."""
