"""Passes that rewrite nothing: they count what the plan reports."""
