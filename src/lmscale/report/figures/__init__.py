"""Drawings from tables and records, of a column's width, readable in grey; each returns a matplotlib Figure."""
