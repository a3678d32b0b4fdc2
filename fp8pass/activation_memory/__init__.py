"""Decide how the backward gets each forward value: exact, in a low-bit format, or recomputed.

costs.py              the costs of saving and recomputing values
added_time.py         the time that a step spends on a saved or recomputed value
reasons.py            the reasons for decisions, in words
decision.py           the decision about each value, and the bytes of its saved tensors
format_choices.py     the formats that the error rules allow for a value
needs.py              the values that the backward needs
cuts.py               the cheapest plan without a budget, by two minimum cuts
backward_memory.py    bytes alive during the backward, to estimate the peak
host_transfer.py      copies to host memory and back, and the waits for them
budget.py             the fastest plan within a memory budget, by a mixed-integer program
planner.py            plans within memory budgets, and the curve of their bytes and times
raise_precision.py    spends the rest of a budget on formats with more bits
propagated_errors.py  counts a saved value's error also in the values recomputed from it
stock.py              PyTorch's own partitioner, to compare its saved bytes or take its plan
"""
