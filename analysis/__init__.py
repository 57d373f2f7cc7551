"""The studies behind the results: each folder holds its scripts, tables and figures, and its records in `records/`.

`ledger/` has the paper's numbers, `report/` what reads and draws records, `pages/` what fills the pages from all.
"""
