"""The configuration: settings, references to fields of events, templates, and references to code."""
