"""PostgreSQL through Django's own backend: an end to every wait, and connections that requests share."""
