"""PostgreSQL through Django's own backend, with an end to every wait."""
