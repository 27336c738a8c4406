"""Read the files of a run and show what it cost, as text or as one HTML page.

Start with `report`. `text` and `html` draw what `tables` and the charts prepare.
"""
