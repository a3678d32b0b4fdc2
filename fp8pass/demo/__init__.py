"""The command `fp8pass demo`: train the same small language model with and without fp8pass.

A byte-level Llama-style decoder learns the source text of Python's standard library, or `--data`.
Both variants start from the same weights and train on the same batches. A third run repeats stock
`torch.compile` with another seed, which shows how much the loss varies by chance. The runs are
sequential, so that each run can use all memory.

options.py   the options, without PyTorch
sizes.py     sizes of the model
data.py      the text, as batches of bytes
model.py     the model
train.py     training and measurement of one variant
compare.py   all runs, one after the other
show.py      progress, table, conclusions and plot
"""
