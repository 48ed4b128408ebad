"""Failures of DNS, TLS, connections and git."""

from __future__ import annotations

from portal.domain.failure_rules import CONSEQUENCE, GENERAL, SPECIFIC, FailureAction, FailureRule

NETWORK_RULES = (
    FailureRule(
        code="dns_failure",
        title="A host name could not be resolved",
        cause="The task has no DNS for this name: the name is wrong, or the network policy of the project forbids "
        "it.",
        fix="Check the name, and whether the project may connect to the internet.",
        pattern=r"Temporary failure in name resolution|Name or service not known|Could not resolve host"
        r"|NameResolutionError"
        r"|nodename nor servname provided",
    ),
    FailureRule(
        code="tls_certificate",
        title="A TLS certificate was not accepted",
        cause="The server's certificate is not signed by an authority that the image knows.",
        fix="Add the certificate of your organization to the image, and set SSL_CERT_FILE or REQUESTS_CA_BUNDLE.",
        priority=SPECIFIC,
        pattern=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSL certificate problem",
    ),
    FailureRule(
        code="proxy_error",
        title="The proxy refused the connection",
        cause="The proxy of the variables HTTP_PROXY or HTTPS_PROXY does not answer, or does not permit the address.",
        fix="Correct these variables, or add the host to NO_PROXY.",
        priority=SPECIFIC,
        pattern=r"ProxyError|Tunnel connection failed: 40\d|HTTP code 40\d from proxy"
        r"|407 Proxy Authentication Required",
    ),
    FailureRule(
        code="network_unreachable",
        title="The network is not reachable",
        cause="The task has no route to the address, for example because of the network policy of its project.",
        fix="Check whether the project may connect to the address.",
        priority=GENERAL,
        pattern=r"Network is unreachable|No route to host",
    ),
    FailureRule(
        code="connection_refused",
        title="A connection was refused",
        cause="Nothing listens at the address, or the server ended before.",
        fix="Check address and port, and the log of the server.",
        priority=CONSEQUENCE - 5,
        pattern=r"[Cc]onnection refused|ECONNREFUSED",
    ),
    FailureRule(
        code="connection_timed_out",
        title="A connection timed out",
        cause="A server did not answer in time.",
        fix="Start it again. If it fails again, check whether the project may connect to the address.",
        action=FailureAction.RETRY,
        priority=CONSEQUENCE - 5,
        pattern=r"[Cc]onnection timed out|ConnectTimeout|Read timed out|ETIMEDOUT",
    ),
    FailureRule(
        code="git_authentication",
        title="git could not authenticate",
        cause="The repository is private or does not exist, and the job has no credentials for it.",
        fix="Give the job a token or a deploy key as a secret.",
        priority=SPECIFIC,
        pattern=r"fatal: (Authentication failed for|could not read (Username|Password) for)"
        r"|Permission denied \(publickey"
        r"|remote: Repository not found|Host key verification failed",
    ),
    FailureRule(
        code="git_reference",
        title="git found no such branch or commit",
        cause="The branch, tag or commit does not exist in the repository, or the clone is too shallow.",
        fix="Check the name, push the commit, or clone without --depth.",
        priority=SPECIFIC,
        pattern=r"fatal: (Remote branch .* not found|reference is not a tree|couldn't find remote ref)"
        r"|error: pathspec '.*' did not match",
    ),
    FailureRule(
        code="git_ownership",
        title="git does not trust the repository's owner",
        cause="The repository belongs to another user than the task runs as.",
        fix="Run git config --global --add safe.directory PATH in the command.",
        priority=SPECIFIC,
        pattern=r"detected dubious ownership in repository",
    ),
)
