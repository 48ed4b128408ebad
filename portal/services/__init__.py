"""Writes: ``do_`` functions change rows and write audit row and event in the same transaction."""
