"""The app that takes orders."""
