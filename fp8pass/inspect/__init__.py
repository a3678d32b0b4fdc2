"""Looking at a model: what was decided about it, and what that does to its gradients.

explanation.py   `fp8pass.explain`; explained.py has its data, tables.py and folding.py its text
report/          the explanation as a page
diagnosis.py     `fp8pass.diagnose`: the gradient error of each layer
bisection/       `fp8pass.bisect`: the layers and saved tensors that an error comes from
calibration.py   `fp8pass.calibrate`: how values are distributed
recording.py     a step's graphs and their inputs
running.py       running a model and leaving it as it was
saved_bytes.py   what a forward saves, measured
"""
