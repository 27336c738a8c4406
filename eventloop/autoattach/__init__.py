"""Attach a bridge to each trainer of a script that knows nothing of eventloop, for `eventloop run`.

Start with `attacher`, which creates the bridges. `hosts` patches the trainer classes of each engine, and
`after_import` calls it when the script has imported that engine. `script` runs the script, and `written_loop`
has the advice for a script without an engine. Nothing here imports torch before the script does. May import
all packages except `cli`.
"""
