"""What background work needs: parts that start and close, threads, retries, progress, memory."""
