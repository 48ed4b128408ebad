"""A complete Fairway on one machine: its own PostgreSQL and Valkey, its keys, and one supervisor."""
