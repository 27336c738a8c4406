"""Serve the live page of `eventloop watch --web` on 127.0.0.1.

Start with `server.serve`. `feed` reads the runs once for all open pages, `watched` finds the sections of a
run that have changed, `sections`, `tables` and `curve_changes` make the parts of a message, `sent` sends
commands, `guard` refuses requests of other sites, and `app` has the routes. The page is in `page.html`,
`page.css` and `*.js`, and loads no files of other servers. The package imports starlette and uvicorn, so only
this command imports it.
"""

from __future__ import annotations
