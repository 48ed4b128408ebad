"""Failures of DNS, TLS, connections and git."""

from __future__ import annotations

from portal.domain.jobs.failure_rules import (
    CERTAIN,
    CONSEQUENCE,
    GENERAL,
    SPECIFIC,
    Evidence,
    FailureAction,
    FailureRule,
)

NETWORK_RULES = (
    FailureRule(
        code="dns_failure",
        title="A host name could not be resolved",
        cause="The task has no DNS for this name: the name is wrong, or the network policy of the project forbids "
        "it.",
        fix="Check the name, and whether the project may connect to the internet.",
        evidence=Evidence.CAUSE,
        pattern=r"Temporary failure (in name resolution|resolving)|Name or service not known|Could not resolve host"
        r"|NameResolutionError"
        r"|nodename nor servname provided",
    ),
    FailureRule(
        code="tls_certificate",
        title="A TLS certificate was not accepted",
        cause="The server's certificate is not signed by an authority that the image knows.",
        fix="Add the certificate of your organization to the image, and set SSL_CERT_FILE or REQUESTS_CA_BUNDLE.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSL certificate problem",
    ),
    FailureRule(
        code="proxy_error",
        title="The proxy refused the connection",
        cause="The proxy of the variables HTTP_PROXY or HTTPS_PROXY does not answer, or does not permit the "
        "address.",
        fix="Correct these variables, or add the host to NO_PROXY.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
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
        evidence=Evidence.CAUSE,
        pattern=r"fatal: (Authentication failed for|could not read (Username|Password) for)"
        r"|Permission denied \(publickey"
        r"|remote: Repository not found",
    ),
    FailureRule(
        code="git_host_key",
        title="The git server has another host key",
        cause="The SSH server did not identify itself with the expected host key: the key is wrong, or another "
        "machine answers.",
        fix="Compare it with the key that the operator of the server publishes, and enter that one in the job.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"Host key verification failed",
    ),
    FailureRule(
        code="code_program_missing",
        title="The image cannot check out code",
        cause="The code is checked out with the git and ssh of the image, and one of them is missing.",
        fix="Install git, and openssh-client for SSH URLs, in the image, or use an image that has them.",
        priority=CERTAIN,
        pattern=r"fairway: the code was not checked out: the image has no (git|ssh)",
    ),
    FailureRule(
        code="code_too_large",
        title="The repository is too large",
        cause="The checked-out code exceeds the limit of the pool.",
        fix="Move data out of the repository into a volume, or ask an administrator to raise code_size_limit_mib.",
        priority=CERTAIN,
        pattern=r"fairway: the code was not checked out: it is larger than the limit",
    ),
    FailureRule(
        code="code_timeout",
        title="The git server took too long",
        cause="The code was not checked out within the limit of the pool: the server does not answer or is slow, "
        "or the project may not connect to it.",
        fix="Check the address and the network policy of the project. Large repositories may need a higher "
        "code_time_limit_s.",
        action=FailureAction.RETRY,
        priority=CERTAIN,
        pattern=r"fairway: the code was not checked out: it took longer than the limit",
    ),
    FailureRule(
        code="git_reference",
        title="git found no such branch or commit",
        cause="The branch, tag or commit does not exist in the repository, or the clone is too shallow.",
        fix="Check the name, push the commit, or clone without --depth.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"fatal: (Remote branch .* not found|reference is not a tree|couldn't find remote ref)"
        r"|error: pathspec '.*' did not match",
    ),
    FailureRule(
        code="git_ownership",
        title="git does not trust the repository's owner",
        cause="The repository belongs to another user than the task runs as.",
        fix="Run git config --global --add safe.directory PATH in the command.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"detected dubious ownership in repository",
    ),
)
