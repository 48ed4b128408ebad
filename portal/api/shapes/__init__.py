"""What goes out: for each noun a plain function that writes it and a serializer that describes it.

The functions are plain because a serializer costs more than the query behind it; a test holds both together.
"""
