"""What two ranks of a gang run to show that they meet: rank 0 prints what the other sent it."""

MEETS = """
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    door = socket.create_server(("", place[1]))
    print("heard", door.accept()[0].recv(9).decode(), flush=True)
else:
    for turn in range(200):
        try:
            socket.create_connection(place, 1).sendall(b"one")
            break
        except OSError:
            time.sleep(0.05)
"""
