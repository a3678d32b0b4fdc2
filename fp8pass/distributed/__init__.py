"""Pipeline parallelism: a saved-activation format for each stage."""
