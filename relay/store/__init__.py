"""All SQL statements on relay's own tables."""
