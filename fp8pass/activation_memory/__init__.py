"""What the backward keeps of each forward value: exactly, in low bits, or recomputed.

costs.py             what keeping and recomputing a value costs
format_choices.py    the cheapest format that the error rules allow for a value
residual_stream.py   which sums of a residual stream may be computed again
decision.py          the values that the backward needs, and the decision about each
cuts.py              the cheapest decisions, by two minimum cuts
planner.py           plans within memory budgets, beside that of the cuts
carried_errors.py    errors of stored values in what is computed again from them
more_bits.py         formats of more bits for what a budget leaves over
budget.py            decisions within a memory budget, by a mixed-integer program
link.py              what can be copied to the host and back beside a step
backward_memory.py   bytes alive over time in the backward, for the budget's estimate of the peak
stock.py             what PyTorch's partitioner saves, for comparison
"""
