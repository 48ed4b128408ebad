"""The hands: links to nodes, and the program that runs on them."""
