"""A decode step of the K3 decoder whose shapes, addresses and launches never change.

Prompts are read by the ordinary decoder; its cache is then loaded into a static one, and from there
on every pass of T rows is the same sequence of ops, fit to be captured in a graph.
"""
