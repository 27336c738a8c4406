"""Draw reports as one HTML page: `eventloop report RUN --html FILE`.

Start with `html`, which has the page's sections; `head` makes its top, `charts` the figures with plotly, and
`elements` tables and lists. `page.css` is the style sheet. May import `reporting` and everything below it.
"""
