"""Programs: what a kernel computes, as data that travels through graphs and caches.

ir.py           loads, steps and stores, of which a program consists
reader.py       reads FX operators into loads and steps
simplify.py     an equal program with fewer steps
verify.py       the rules of a well-formed program
batch.py        several programs that one operator runs
emit.py         adds that operator to the graph, and its results in place of nodes
reference.py    the results of a program, operator by operator in PyTorch
"""
