"""Passes over joint graphs, which contain forward and backward, in the order `JOINT_PASSES`."""
