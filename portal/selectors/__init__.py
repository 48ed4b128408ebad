"""Reads, a file a noun: rows for pages and API in a constant number of queries."""
