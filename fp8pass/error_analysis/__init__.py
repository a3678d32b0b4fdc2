"""Error rules: how much an error of each stored value is amplified in the gradients.

The rules follow sections 4.1 and 8.1 of the AGoQ paper.

| question | file |
| --- | --- |
| Which values may be stored in which format? | error_rules.py |
| What is the rule of one region of operators? | derivation.py |
| How is a joint graph cut into regions? | regions.py |
| What are the formulas of a region's values? | expressions.py |
| Which samples are the formulas evaluated on? | samples.py |
| What are the factors that gradients are multiplied by? | factors.py |
| How large are the bound and the expected value of the amplification? | amplification.py |
| Which comparisons make results jump? | jumps.py |
| Which values have outliers, grow exponentially, or are divisors? | ranges.py |
| In which sums may the terms nearly cancel? | differences.py |
| Which values are nonnegative or nonpositive in all elements? | signs.py |
| Which values are summed in scans and gradients of small parameters? | summed_values.py |
| How much does attention amplify errors? | attention.py |
| How are the rules written for `fp8pass.explain`? | formulas.py |
"""
