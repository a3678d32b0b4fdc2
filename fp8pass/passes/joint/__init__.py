"""Passes over joint graphs: forward and backward in one. `JOINT_PASSES` has their order."""
