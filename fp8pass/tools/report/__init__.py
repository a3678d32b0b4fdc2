"""The report: the decisions about a model as one HTML page that works offline.

picture.py         drawing of a joint graph: operators in columns by module, tensors as edges
repeated_layers.py repeated layers drawn once
timeline.py        saved bytes at each operator of a step
diffs.py           the changes of each pass by module
comparison.py      two explanations compared by module
page.py            computes the template's data with all of these modules
template.html.j2, page.css, picture.js, page.js, vendor/    the page itself
"""

from __future__ import annotations

from fp8pass.tools.report.page import render

__all__ = ["render"]
