"""Configuration: settings, the Celery application, the ASGI entry and the URL table."""
