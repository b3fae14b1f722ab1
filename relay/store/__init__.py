"""Every SQL statement on relay's own tables."""
