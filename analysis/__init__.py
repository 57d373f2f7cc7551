"""The studies behind the results: each folder has what it runs, its tables, figures and records.

`report/` puts them together; the records of a study are in its folder `records/`.
"""
