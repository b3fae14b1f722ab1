"""The commands of operators and administrators, one module each."""
