"""The one Django app of the portal."""

from django.apps import AppConfig


class PortalConfig(AppConfig):
    """Registers the portal's models under the label ``portal``."""

    name = "portal"
    label = "portal"
    default_auto_field = "django.db.models.BigAutoField"
