"""The engine: photographs the record, decides purely, writes back, and carries out on the nodes."""
