"""Commands of an administrator, one module each."""
