"""``streamoverlap doctor``: what this machine has, what will be used, and whether results are right.

`examination` runs the steps; the other files are the steps. Nothing here imports torch or the compiled part when it is
imported: the doctor also runs where neither can be loaded.
"""
