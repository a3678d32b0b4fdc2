"""Tools that run a model to show what fp8pass does to it: explain, fit, diagnose, bisect, ...

explanation.py        `explain`: the plans of a model's graphs, and why they are so
explanation_data.py   an explanation as data, which tables and the report show
tables.py             tables of an explanation, for a terminal
terminal.py           tables as text, as wide as the terminal
folding.py            rows of repeated layers put together, for both
report/               an explanation as one HTML page
diagnosis.py          `diagnose`: the gradient error of every layer
prediction.py         the same error as the error rules predict it
bisection/            `bisect`: the layers that cause a large gradient error
fitting/              `fit`: whether a model trains on a GPU, and how
calibration.py        `calibrate`: means and standard deviations of activations
recording.py          the joint graphs and inputs of one step, for diagnose and calibrate
saved_bytes.py        bytes that a model saves for its backward, measured
cli/                  the command line
sharpness.py          `sharpness`, of the loss around the last token's logits
running.py            the options a model was compiled with; its state put back after a run
"""
