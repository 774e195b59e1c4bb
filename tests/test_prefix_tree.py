"""The radix tree against a naive dictionary of texts, and its own shape after every change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.prefix_tree import Node, RadixTree, common

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def items(tree: RadixTree[str]) -> dict[tuple[int, ...], str]:
    """All texts with their values, read off the tree by hand, its shape checked on the way."""
    found: dict[tuple[int, ...], str] = {}
    stack: list[tuple[Node[str], tuple[int, ...]]] = [(tree.root, ())]
    assert tree.root.value is None
    while stack:
        node, text = stack.pop()
        if node is not tree.root:
            assert node.tokens, "an edge without tokens"
            assert node.value is not None or len(node.children) >= 2, "a node for nothing"
        if node.value is not None:
            found[text] = node.value
        for first, child in node.children.items():
            assert child.tokens[0] == first, "filed under another token"
            stack.append((child, text + child.tokens))
    return found


def expected_path(model: dict[tuple[int, ...], str], text: Sequence[int]) -> tuple[list[str], int]:
    """From the definition: texts that it begins with, and the longest common beginning with any."""
    begins = sorted((key for key in model if tuple(text[: len(key)]) == key), key=len)
    shared = 0
    for key in model:
        alike = 0
        while alike < min(len(key), len(text)) and key[alike] == text[alike]:
            alike += 1
        shared = max(shared, alike)
    return [model[key] for key in begins], shared


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_tree_against_a_dictionary(data: st.DataObject):
    tree: RadixTree[str] = RadixTree()
    model: dict[tuple[int, ...], str] = {}
    for step in range(data.draw(st.integers(1, 20))):
        if model and data.draw(st.integers(0, 2)) == 0:
            leaves = list(tree.leaves())
            leaf = leaves[data.draw(st.integers(0, len(leaves) - 1))]
            value = leaf.node.value
            (text,) = (key for key, held in model.items() if held == value)
            assert not [key for key in model if len(key) > len(text) and key[: len(text)] == text]
            tree.drop(leaf)
            del model[text]
        else:
            text = tuple(data.draw(TEXTS))
            tree.put(text, f"value {step}", step, lambda later: later)
            model[text] = f"value {step}"
        assert items(tree) == model
        asked = data.draw(TEXTS)
        path = tree.path(asked)
        assert ([node.value for node in path.nodes], path.shared) == expected_path(model, asked)
        assert sorted(node.value for node in tree.nodes()) == sorted(model.values())
        extended = {k for k in model for other in model if other != k and other[: len(k)] == k}
        assert {leaf.node.value for leaf in tree.leaves()} == {
            value for key, value in model.items() if key not in extended
        }


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), TEXTS)
def test_what_follows_next_is_told_and_nothing_else(texts: list[list[int]], new: list[int]):
    """`below` reaches the first value on each way down from the new one, exactly once."""
    tree: RadixTree[str] = RadixTree()
    for text in texts:
        tree.put(text, "".join(map(str, text)), 0, lambda later: later)
    before = items(tree)
    told: list[str] = []

    def note(later: str) -> str:
        told.append(later)
        return later + "!"

    tree.put(new, "new", 1, note)
    behind = {k: v for k, v in before.items() if len(k) > len(new) and k[: len(new)] == tuple(new)}
    between = {k for k in behind for other in behind if other != k and k[: len(other)] == other}
    first = {value for key, value in behind.items() if key not in between}
    assert sorted(told) == sorted(first)
    after = items(tree)
    for key, value in before.items():
        if key != tuple(new):
            assert after[key] == (f"{value}!" if value in first else value)


def test_a_failure_while_a_node_is_built_changes_nothing():
    tree: RadixTree[str] = RadixTree()
    for text in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6]):
        tree.put(text, str(text), 0, lambda later: later)
    before = items(tree)

    def fail(later: str) -> str:
        raise MemoryError(later)

    with pytest.raises(MemoryError):
        tree.put([1], "new", 1, fail)
    assert items(tree) == before


def test_an_empty_text_has_no_place():
    with pytest.raises(ValueError, match="empty text"):
        RadixTree().put([], "x", 0, lambda later: later)
    assert RadixTree().path([1, 2]).nodes == ()


def test_common_beginnings():
    assert [common([1, 2, 3], x) for x in ([], [1], [1, 2, 3, 4], [2], [1, 3])] == [0, 1, 3, 0, 1]
