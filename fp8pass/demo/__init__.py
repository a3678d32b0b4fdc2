"""The command `fp8pass demo`: train the same small language model with and without fp8pass.

A byte-level Llama-style decoder learns the source text of Python's standard library, or the text in
`--data`. Both variants start from the same weights and train on the same batches. A third run uses
stock `torch.compile` with another seed, to show how much the loss varies by chance. The runs are
sequential, so that each run can use all memory.

options.py   the command line's options
sizes.py     sizes of the model and its training
data.py      the text, as batches of bytes
model.py     the model
train.py     training and measurement of one variant
compare.py   training of all variants, and the comparison
show.py      output: progress, table, conclusions and plot
"""
