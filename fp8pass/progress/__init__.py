"""What users see of a compilation.

spinner.py    what is being done for minutes, on a terminal
settled.py    one line about a model, when all of it is compiled
gain.py       whether FP8 makes it faster
"""
