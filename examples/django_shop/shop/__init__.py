"""The app that stores orders."""
