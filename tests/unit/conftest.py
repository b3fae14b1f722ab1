"""How the unit tests use hypothesis."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("relay", deadline=None)
settings.load_profile("relay")
