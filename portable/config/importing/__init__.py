"""Files of other programs: one table of their names, and one function from a file to settings and notes.

The table is imported where there is such a file, and where a name is unknown, which may be another program's.
"""
