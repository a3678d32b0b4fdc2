"""The report: what was decided about a model, as one HTML page that opens offline.

    picture.py    a joint graph as operators in columns by module, and what flows between them
    folding.py    repeated layers drawn once
    sources.py    the line of the user's model that an operator comes from
    timeline.py   bytes kept at each operator of a step
    diffs.py      what each pass changed, module by module
    page.py       all of it as what the template shows
    template.html.j2, page.css, page.js, vendor/    the page itself

Python says what there is; the page lays it out, with the libraries in `vendor/`.
"""

from __future__ import annotations

from fp8pass.inspect.report.page import write_report

__all__ = ["write_report"]
