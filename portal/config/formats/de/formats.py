"""Numbers are written alike in all languages: pages, commands, YAML and style sheets share them."""

DECIMAL_SEPARATOR = "."
THOUSAND_SEPARATOR = ","
