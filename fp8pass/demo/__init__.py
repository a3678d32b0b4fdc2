"""The command `fp8pass demo`: train the same small language model with and without fp8pass.

The model is a byte-level decoder in the style of Llama. It learns the source text of Python's
standard library, or the text in `--data`. Both runs have the same initial weights and batches. A
third run with another seed shows how much the loss varies by chance.

options.py   the command line's options
sizes.py     sizes of the model, its batches and its training
data.py      the text, as batches of bytes
model.py     the model
train.py     training and measurement of one variant
compare.py   training of all variants, and the comparison
show.py      output: progress, table, conclusions and plot
"""
