"""Programs: descriptions of fused kernels, as data that graphs and caches can contain.

ir.py              loads, steps and stores, the parts of a program
reader.py          reads FX operators into loads and steps
simplify.py        removes steps from a program
verify.py          the rules of a well-formed program
program_batch.py   several programs that one operator runs
emit.py            replaces nodes of a graph by an operator that runs programs
reference.py       computes a program operator by operator in PyTorch
"""
