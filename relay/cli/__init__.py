"""The commands, one module for each group of them. No logic of their own."""
