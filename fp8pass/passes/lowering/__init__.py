"""Passes over forward and backward graphs before Inductor, in the order `LOWERING_PASSES`."""
