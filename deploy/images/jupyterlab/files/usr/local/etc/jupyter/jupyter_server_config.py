# JupyterLab behind Fairway's gateway: it listens for the node's loopback interface and requires the secret.
import os

c = get_config()  # noqa: F821

c.ServerApp.ip = "0.0.0.0"  # noqa: S104 - of the container, whose port is published on the node's loopback
c.ServerApp.port = int(os.environ.get("FAIRWAY_PORT", "8888"))
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
# the Host header is the workspace's; the secret authenticates requests
c.ServerApp.allow_remote_access = True
c.ServerApp.trust_xheaders = False
c.ServerApp.quit_button = False
c.ServerApp.root_dir = os.environ.get("HOME", "/")

load_subconfig("gateway_identity.py")  # noqa: F821

# Time to save after the SIGTERM of a stop.
c.MappingKernelManager.shutdown_wait_time = 2.0
# No update checks and no news.
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.news_url = None


def _without_delay():
    """Disable Nagle's algorithm (TCP_NODELAY) for kernel messages.

    A reply consists of several small messages (busy, reply, idle). Tornado leaves it to TCP to combine them,
    which delays each until the previous one is acknowledged: 40 ms for every cell.
    """
    from tornado.websocket import WebSocketHandler

    detach = WebSocketHandler.detach

    def detached(handler):
        stream = detach(handler)
        stream.set_nodelay(True)
        return stream

    WebSocketHandler.detach = detached


_without_delay()
