"""Name temporary files after the process that writes them, and remove those of processes that have ended.

Start with `names`. `process_identity` distinguishes processes that have had the same id, `leftovers` removes
the temporary files of killed saves, and `sync` makes the names in a directory durable. The process that
writes checkpoints runs these modules, so they import only the standard library. Every other package may
import them; they import no other package of eventloop.
"""
