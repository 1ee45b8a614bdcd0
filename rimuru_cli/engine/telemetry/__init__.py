"""What an engine tells about itself while it runs, for readers in other processes. Nothing here imports torch or a terminal library.

frame.py      what a reader gets: one moment of one engine
sources.py    what gives frames: a running engine, or a recording
tables.py     what an engine writes down: the owners of its pages
layout.py     from the owners to the map of the whole pool
assemble.py   from tables to a frame
"""
