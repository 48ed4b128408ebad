"""Reads: rows for pages and REST in a constant number of queries."""
