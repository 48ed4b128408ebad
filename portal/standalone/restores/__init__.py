"""Restores a backup: all of it or nothing, also when it is interrupted."""
