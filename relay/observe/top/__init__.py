"""What `relay top` and `relay demo` show: polls a group, derives rates, and formats them as lines."""
