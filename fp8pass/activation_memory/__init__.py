"""How each forward value reaches the backward: saved exactly, in low bits, or recomputed.

costs.py              the costs of saving and recomputing values
reasons.py            the reasons for decisions, in words
decision.py           the decision about each value, and the bytes of its saved tensors
format_choices.py     the formats that the error rules allow for a value
needs.py              the values that the backward needs
cuts.py               the cheapest decisions, by two minimum cuts
backward_memory.py    bytes alive during the backward, to estimate the peak
host_transfer.py      copies to host memory and back, and the waits for them
budget.py             decisions within a memory budget, by a mixed-integer program
planner.py            plans within memory budgets, compared with the plan of the cuts
raise_precision.py    formats of more bits for the rest of a budget
propagated_errors.py  errors of saved values in the values recomputed from them
stock.py              PyTorch's own partitioner, for comparison
"""
