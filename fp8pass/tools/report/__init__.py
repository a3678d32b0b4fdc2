"""The report: the decisions about a model as one HTML page that opens offline.

    picture.py    a joint graph as operators in columns by module, with the tensors between them
    folding.py    repeated layers drawn once
    sources.py    the line of the user's model that an operator comes from
    timeline.py   bytes kept at each operator of a step
    diffs.py      the changes of each pass, module by module
    comparison.py two explanations side by side, by module
    page.py       all of this as the data of the template
    template.html.j2, page.css, picture.js, page.js, vendor/    the page itself

Python makes the data; the page lays it out, with the libraries in `vendor/`.
"""

from __future__ import annotations

from fp8pass.tools.report.page import write_report

__all__ = ["write_report"]
