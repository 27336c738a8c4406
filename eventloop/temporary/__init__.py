"""Name temporary files after the process that writes them, and remove those of processes that have ended.

Start with `names`. `process_identity` distinguishes processes that have one id, `leftovers` finds and removes
what killed saves have left, and `sync` makes the names in a directory durable. The saver's process runs these
modules, so they import only the standard library. Every other package may import them; they import no other
package of eventloop.
"""
