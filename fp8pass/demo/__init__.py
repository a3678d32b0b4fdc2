"""`python -m fp8pass.demo`: train the same small language model with and without fp8pass.

A byte-level Llama-style decoder learns the source text of Python's standard library, or `--data`.
Both variants start from the same weights and see the same batches, one after the other so that
each has the memory for itself.
"""
