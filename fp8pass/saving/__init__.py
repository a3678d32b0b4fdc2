"""How forward values reach the backward: kept exactly, in low bits, or computed again.

decision.py          what the backward needs, and what was decided about it
storage.py           the format a value would be kept in
costs.py             what keeping and recomputing cost
cuts.py              the plan of two minimum cuts
budget.py            the plan under a memory budget, a mixed-integer program
backward_memory.py   what the backward holds at once
stock.py             what PyTorch would keep
"""
