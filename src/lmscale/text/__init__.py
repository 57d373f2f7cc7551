"""Texts on disk: which files are read, their formats, and the rules by which they become documents.

Read input_files.py (the files of a path), formats.py (the rows of a file), documents.py (which rows are documents),
whole_file.py (a file that is one text) and tables.py (the rows of a task's tables).
"""
