"""Writes, a file a noun: ``do_`` changes the record and leaves audit and event in the same transaction."""
