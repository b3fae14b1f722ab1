"""From a batch to its outcome: plan the tasks, apply each, inline or on Spark."""
