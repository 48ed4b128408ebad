"""Settings of all processes, read from the environment. No secret has a default."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

from environ import Env

from portal.config import data_paths, production_checks, variables

# Most of what Django allocates needs no garbage collection: with Python's threshold of 700 objects the web process
# takes a quarter longer to start. Full collections come after 250,000 objects, before after 70,000.
gc.set_threshold(10_000, 5, 5)


for _warning in variables.check_environment():
    if not os.environ.get("FAIRWAY_SUPERVISED"):  # `up` has said it
        sys.stderr.write(f"{_warning}\n")

BASE_DIR = Path(__file__).resolve().parent.parent.parent
DATA_DIR = data_paths.data_dir()

DEBUG = variables.DEBUG.read()
SECRET_KEY = variables.SECRET_KEY.read() or data_paths.read_secret_key(DATA_DIR)
if SECRET_KEY and production_checks.is_weak_key(SECRET_KEY):
    raise variables.SettingsRefused(f"The key in {DATA_DIR / 'secret_key'} is too easy to guess.")
SECRET_KEY_FALLBACKS = variables.SECRET_KEY_FALLBACKS.read()

PORTAL_URL = variables.PORTAL_URL.read()
APPS_DOMAIN = variables.APPS_DOMAIN.read()
"""Workspaces are at ws-<public id>.<this>, services at svc-<public id>; with the port if it is not the default."""
TRACKING_URL = variables.TRACKING_URL.read() or PORTAL_URL
"""Where jobs reach the MLflow API: the portal, or an address before it that containers may connect to."""
EGRESS_DENY = variables.EGRESS_DENY.read()
"""Additional addresses or networks that no container may connect to, such as a proxy before the portal."""
ALLOWED_HOSTS = variables.ALLOWED_HOSTS.read()
HTTPS_ENABLED = PORTAL_URL.startswith("https://")
CSRF_TRUSTED_ORIGINS = [PORTAL_URL]

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.postgres",
    "django_htmx",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "channels",
    "portal",
]

MIDDLEWARE = [
    "portal.database.pool_middleware.ReleaseConnectionMiddleware",
    "portal.web.middleware.security_headers.SecurityHeadersMiddleware",
    "portal.web.middleware.render_time.RenderTimeMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "portal.api.framework.middleware.ApiProblemMiddleware",
    "portal.web.middleware.static_files.StaticFilesMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "portal.policy_middleware.PolicyMiddleware",
    "portal.web.middleware.error_pages.ErrorPageMiddleware",
    "portal.web.middleware.language.LanguageMiddleware",
]

ROOT_URLCONF = "portal.config.urls"
ASGI_APPLICATION = "portal.asgi.application"

FORM_RENDERER = "portal.web.form_renderer.DirectRenderer"
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "portal.web.display.navigation.navigation_context",
            ],
            "builtins": [
                "django.templatetags.static",
                "django.templatetags.i18n",
                "portal.web.display.template_tags",
            ],
        },
    },
]

DATABASES = {
    "default": Env.db_url_config(variables.DATABASE_URL.read() or data_paths.database_url(DATA_DIR)),
}
DATABASES["default"]["ENGINE"] = "portal.database"
DATABASES["default"].setdefault("OPTIONS", {})
DATABASES["default"]["OPTIONS"].update(
    {
        "connect_timeout": 5,
        # A process that is stopped inside a transaction holds its locks no longer than a leader's lease
        # lasts.
        "options": "-c statement_timeout=10000 -c lock_timeout=5000 -c idle_in_transaction_session_timeout=8000"
        " -c timezone=UTC -c jit=off"
        # Planning joins of more tables in every order takes longer than running them.
        " -c join_collapse_limit=5",
    }
)
DATABASES["default"]["CONN_MAX_AGE"] = 60
DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
DATABASE_POOL = variables.DATABASE_POOL.read()
"""Connections shared by all requests of the web process; 0 opens one per request."""
DATABASE_OWNER: dict[str, Any] = {}
"""The role that owns the tables, for migrations, backups and restores.

Empty if DATABASE_URL names the only role.
"""
_owner_url = variables.DATABASE_OWNER_URL.read()
if not _owner_url and not variables.DATABASE_URL.read():
    _owner_url = data_paths.database_url(DATA_DIR, data_paths.OWNER_ROLE)
if _owner_url:
    DATABASE_OWNER = Env.db_url_config(_owner_url)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

BUNDLED_SERVERS = variables.BUNDLED_SERVERS.read()
"""`up` runs the bundled PostgreSQL and Valkey: for evaluation and small teams. The admin page says so."""
REDIS_URL = variables.REDIS_URL.read() or data_paths.redis_url(DATA_DIR)

SAME_SITE_WARNING = ""
"""Set if pages of workspaces could set cookies for the portal."""
if HTTPS_ENABLED:
    _unsafe = production_checks.unsafe_setting_errors(
        debug=DEBUG, allowed_hosts=ALLOWED_HOSTS, redis_url=REDIS_URL
    )
    if _unsafe:
        raise variables.SettingsRefused(f"Fairway does not start at {PORTAL_URL}. {' '.join(_unsafe)}")
    SAME_SITE_WARNING = production_checks.same_site_warning(PORTAL_URL, APPS_DOMAIN)

AUTH_USER_MODEL = "portal.User"
LOGIN_URL = "/sign-in/"
LOGIN_REDIRECT_URL = "/"
PASSWORD_HASHERS = ["portal.services.accounts.password_hasher.BoundedArgon2"]
AUTH_PASSWORD_VALIDATORS = [
    {
        "NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator",
        "OPTIONS": {"user_attributes": ["username", "full_name", "email"]},
    },
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

_prefix = "__Host-" if HTTPS_ENABLED else ""  # browsers reject the prefix over plain http
SESSION_ENGINE = "portal.services.accounts.sessions"
SESSION_COOKIE_NAME = f"{_prefix}fairway_session"
SESSION_COOKIE_SECURE = HTTPS_ENABLED
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = round(variables.SESSION_IDLE_HOURS.read() * 3600)
"""A session ends after this many seconds without a page or an open workspace.

See ``portal.services.accounts.sessions``.
"""
SESSION_MAX_AGE_S = round(variables.SESSION_DAYS.read() * 24 * 3600)
CSRF_COOKIE_NAME = f"{_prefix}fairway_csrf"
CSRF_COOKIE_SECURE = HTTPS_ENABLED
CSRF_COOKIE_HTTPONLY = True
CSRF_COOKIE_SAMESITE = "Lax"
CSRF_FAILURE_VIEW = "portal.web.middleware.error_pages.csrf_failure"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS_ENABLED else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = HTTPS_ENABLED
SECURE_HSTS_PRELOAD = HTTPS_ENABLED
SECURE_SSL_REDIRECT = HTTPS_ENABLED
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]
if (
    HTTPS_ENABLED
):  # web listens on a unix socket only; the gateway sets this header and strips what clients send
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024
MAX_ARTIFACT_BYTES = variables.MAX_ARTIFACT_MIB.read() * 2**20
"""The largest file that a run may store."""
MAX_UPLOAD_BYTES = variables.MAX_UPLOAD_MIB.read() * 2**20
"""The largest file that a user may upload to a node, and the largest body of any upload."""
FILE_UPLOAD_TEMP_DIR = str(DATA_DIR / "run") if os.path.isdir(DATA_DIR / "run") else None  # noqa: PTH112 - never raises
"""Large bodies are written here first; /tmp may be small."""

MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"  # no third cookie

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = True
LANGUAGES = [("en", "English"), ("de", "Deutsch")]
LOCALE_PATHS = [BASE_DIR / "portal" / "locale"]
FORMAT_MODULE_PATH = ["portal.config.formats"]

STATIC_URL = "/static/"
STATIC_ROOT = Path(variables.STATIC_ROOT.read() or BASE_DIR / "static" / "root")
STATICFILES_DIRS = [path for path in [BASE_DIR / "static" / "dist"] if path.is_dir()]
WHITENOISE_USE_FINDERS = variables.STATIC_FINDERS.read()
WHITENOISE_AUTOREFRESH = False
WHITENOISE_ALLOW_ALL_ORIGINS = False
WHITENOISE_IMMUTABLE_FILE_TEST = r"/chunks/[\w.]+-[A-Z0-9]{8}\.js$"  # the bundler names them by content

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "UNAUTHENTICATED_USER": None,
}

SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Fairway",
    "DESCRIPTION": "The REST API of Fairway, a portal for a shared GPU cluster.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.1",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SERVE_INCLUDE_SCHEMA": False,
    "COMPONENT_SPLIT_REQUEST": True,
    "POSTPROCESSING_HOOKS": [],
    "SWAGGER_UI_DIST": "SIDECAR",
}

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        # redis-py 8 closes idle sockets after a default timeout
        "CONFIG": {"hosts": [{"address": REDIS_URL, "socket_timeout": None}], "prefix": "fairway"},
    },
}

LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "filters": {"compact_request_errors": {"()": "portal.config.log_filters.CompactRequestErrors"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["compact_request_errors"],
        }
    },
    "root": {"handlers": ["stderr"], "level": variables.LOG_LEVEL.read()},
}

KEY_FILES = {
    # Each process has only the key that it needs; the other keys are not in its environment.
    "control": variables.CONTROL_KEY.read(),
    "watch": variables.WATCH_KEY.read(),
    "tunnel": variables.TUNNEL_KEY.read(),
}
KEY_DIR = DATA_DIR / "keys"
LOG_DIR = DATA_DIR / "logs"
"""Mirrored logs of tasks: LOG_DIR/<job>/<attempt>/<rank>.<format>."""
TERMINAL_IDLE_S = variables.TERMINAL_IDLE_MIN.read() * 60
"""A terminal without input for this many seconds is closed."""
SUPPORT_ADDRESS = variables.SUPPORT_ADDRESS.read()
"""The mail address of "Ask for help" on a job's page; blank: no mail button."""
LOG_RETENTION_DAYS = variables.LOG_RETENTION_DAYS.read()
BACKUP_ALERT_HOURS = variables.BACKUP_ALERT_HOURS.read()
"""Logs of jobs that ended more days ago are removed; 0 keeps them forever."""

SMTP_URL = variables.SMTP_URL.read()
"""smtp://, smtp+tls:// (STARTTLS) or smtp+ssl://, with user, password, host and port; blank: no e-mail is sent."""
if SMTP_URL:
    _smtp = Env.email_url_config(SMTP_URL)
    EMAIL_HOST, EMAIL_PORT = _smtp["EMAIL_HOST"], _smtp["EMAIL_PORT"] or 25
    EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _smtp["EMAIL_HOST_USER"] or "", _smtp["EMAIL_HOST_PASSWORD"] or ""
    EMAIL_USE_TLS, EMAIL_USE_SSL = _smtp.get("EMAIL_USE_TLS", False), _smtp.get("EMAIL_USE_SSL", False)
SMTP_PASSWORD_FILE = variables.SMTP_PASSWORD_FILE.read()
"""Holds the password instead of SMTP_URL; only worker-nodes, which sends, reads it."""
DEFAULT_FROM_EMAIL = variables.MAIL_FROM.read()
