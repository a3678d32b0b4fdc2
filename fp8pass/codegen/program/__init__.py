"""Programs: descriptions of fused kernels, as data that graphs and caches can contain.

ir.py              loads, steps and stores, the parts of a program
reader.py          converts FX nodes to loads and steps
simplify.py        removes steps from a program
verify.py          the rules of a well-formed program
program_batch.py   several programs that one operator runs
emit.py            adds operators that run programs to a graph
reference.py       runs the operators of a program in PyTorch, one by one
"""
