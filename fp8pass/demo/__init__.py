"""`fp8pass demo`: train the same small language model with and without fp8pass.

A byte-level Llama-style decoder learns the source text of Python's standard library, or `--data`.
Both variants start from the same weights and see the same batches. A third run repeats stock
`torch.compile` with another seed, because its loss shows how large differences by chance are. The
runs follow each other, so that each has all the memory.

options.py   the options, without PyTorch
sizes.py     sizes of the model
data.py      the text, as batches of bytes
model.py     the model
train.py     training and measuring one variant
compare.py   all runs, one after the other
show.py      progress, table, conclusions and plot
"""
