"""Attach a bridge to each trainer of a script that knows nothing of eventloop, for `eventloop run`.

Start with `attacher`, which makes the bridges; `hosts` says where each engine takes one, and `after_import`
calls it when the script has imported that engine. `script` runs the script, `written_loop` has the advice for
one without an engine. Nothing here imports torch before the script does. May import everything but `cli`.
"""
