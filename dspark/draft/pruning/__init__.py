"""Pruning a drafter: what can be removed, what removing it costs, and removing it.

`axes.py` lists the dimensions that shrink and every tensor that shrinks with them, `graph.py`
removes units along them through torch-pruning's dependency graph, `low_rank.py` does the rank of
the vanilla head by SVD, `sizes.py` counts parameters and bytes of sizes before they exist, and
`plan.py` finds the best size within a budget.
"""
