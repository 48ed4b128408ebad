"""Configuration: settings, the Celery application and the URL table."""
