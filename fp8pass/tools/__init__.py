"""Tools that run a model to show what fp8pass does to it: explain, fit, diagnose, bisect, ...

explanation.py        `explain`: the plans of a model's graphs, with reasons
explanation_data.py   an explanation as data, for the tables and the report
tables.py             tables of an explanation, for a terminal
report/               an explanation as one HTML page
folding.py            rows of repeated layers folded into one row, for tables and report
output.py             output of all results: tables as text, JSON, figures
diagnosis.py          `diagnose`: the gradient error of every layer
prediction.py         the error that the error rules predict for `diagnose`
bisection.py          `bisect`: the layers and saved tensors that cause a large gradient error
culprit_search.py     the search algorithm of `bisect`
fitting/              `fit`: whether a model trains on a GPU, and how
calibration.py        `calibrate`: means and standard deviations of activations
sharpness.py          `sharpness`: how far the loss rises near the last token's logits
recording.py          the joint graphs and inputs of one step, for diagnose and calibrate
saved_bytes.py        measured bytes that a model saves for its backward
self_check.py         `fp8pass env --check`: every kernel and GEMM on a GPU against the reference
running.py            the configuration of a compiled model; runs that restore the model's state
cli/                  the command line
"""
