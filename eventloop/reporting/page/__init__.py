"""Draw reports as one HTML page: `eventloop report RUN --html FILE`.

Start with `html`, which has the page's sections. `head` makes the top of the page, `charts` its figures with
plotly, and `elements` its tables and lists. `page.css` is the style sheet. May import `reporting` and the
packages below it.
"""
