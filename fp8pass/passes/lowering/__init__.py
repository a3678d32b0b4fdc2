"""Passes over forward and backward graphs, before Inductor. `LOWERING_PASSES` is their order."""
