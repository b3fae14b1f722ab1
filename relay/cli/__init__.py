"""The commands, one module each group of them. No logic of their own."""
