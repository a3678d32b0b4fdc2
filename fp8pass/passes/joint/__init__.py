"""Passes over joint graphs, which contain forward and backward. `JOINT_PASSES` is their order."""
