"""`fp8pass.diagnose`: the gradient error of every layer, measured, beside what the rules predicted."""
