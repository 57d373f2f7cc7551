"""The studies behind the results: each folder holds its scripts, tables, figures and records.

`report/` combines them; the records of a study are in its folder `records/`.
"""
