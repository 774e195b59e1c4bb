"""A radix tree over token ids: texts that begin alike share the path to where they part.

Every change is one assignment into one dictionary. A new node, with the copies of what it splits,
is built completely before that assignment, so whoever looks sees the tree before the change or
after it, and a failure on the way leaves it as it was.

Shape: the root has no value; any other node without one has at least two children. So a node
without children has a value, and a value that nothing builds on is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(eq=False)
class Node(Generic[Value]):
    """tokens of the edge that leads here, at least one; value of the text that ends here, if any;
    used, a clock's reading of the last time it was asked for."""

    tokens: tuple[int, ...]
    children: dict[int, Node[Value]] = field(default_factory=dict)
    value: Value | None = None
    used: int = 0


@dataclass(frozen=True)
class Path(Generic[Value]):
    """What the tree has of a text.

    nodes   those with a value whose text the text begins with, shortest first
    shared  how many of its first tokens some text of the tree begins with as well
    """

    nodes: tuple[Node[Value], ...]
    shared: int


@dataclass(frozen=True, eq=False)
class Leaf(Generic[Value]):
    """A value that no other builds on, and the two nodes above it (None above the root)."""

    node: Node[Value]
    parent: Node[Value]
    grandparent: Node[Value] | None


class RadixTree(Generic[Value]):
    """Values by text; every text has at least one token."""

    def __init__(self) -> None:
        self.root: Node[Value] = Node(())

    def path(self, tokens: Sequence[int]) -> Path[Value]:
        """Walk down along a text."""
        node, done, found = self.root, 0, []
        while done < len(tokens) and (child := node.children.get(tokens[done])) is not None:
            alike = common(child.tokens, tokens[done : done + len(child.tokens)])
            done += alike
            if alike < len(child.tokens):
                break
            node = child
            if node.value is not None:
                found.append(node)
        return Path(tuple(found), done)

    def put(
        self, tokens: Sequence[int], value: Value, used: int, below: Callable[[Value], Value]
    ) -> None:
        """Give a text its value, in place of any other; `below` makes the values that follow next
        on any way down into what they are behind this one."""
        if not tokens:
            raise ValueError("an empty text has no place in the tree")
        node, rest = self.root, tuple(tokens)
        while True:
            child = node.children.get(rest[0])
            if child is None:
                node.children[rest[0]] = Node(rest, {}, value, used)
                return
            alike = common(child.tokens, rest)
            if alike == len(child.tokens) < len(rest):
                node, rest = child, rest[alike:]
                continue
            node.children[rest[0]] = _split(child, rest, alike, value, used, below)
            return

    def nodes(self) -> Iterator[Node[Value]]:
        """All nodes that have a value."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.value is not None:
                yield node

    def leaves(self) -> Iterator[Leaf[Value]]:
        """All values that no other builds on."""
        stack: list[tuple[Node[Value], Node[Value] | None]] = [(self.root, None)]
        while stack:
            parent, grandparent = stack.pop()
            for node in parent.children.values():
                if node.children:
                    stack.append((node, parent))
                else:
                    yield Leaf(node, parent, grandparent)

    def drop(self, leaf: Leaf[Value]) -> None:
        """Forget a leaf, and join the edges around a parent that is nobody's end any more."""
        node, parent, above = leaf.node, leaf.parent, leaf.grandparent
        if above is None or parent.value is not None or len(parent.children) > 2:
            del parent.children[node.tokens[0]]
            return
        (other,) = (child for child in parent.children.values() if child is not node)
        joined = Node(parent.tokens + other.tokens, other.children, other.value, other.used)
        above.children[parent.tokens[0]] = joined


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _split(
    child: Node[Value],
    rest: tuple[int, ...],
    alike: int,
    value: Value,
    used: int,
    below: Callable[[Value], Value],
) -> Node[Value]:
    """What replaces a child that shares its first `alike` tokens with the rest of a text."""
    if alike < len(rest):
        lower = Node(child.tokens[alike:], child.children, child.value, child.used)
        leaf = Node(rest[alike:], {}, value, used)
        both = {lower.tokens[0]: lower, leaf.tokens[0]: leaf}
        return Node(rest[:alike], both, None, used)
    if alike == len(child.tokens):
        children = {first: _behind(node, below) for first, node in child.children.items()}
        return Node(rest, children, value, used)
    lower = Node(child.tokens[alike:], child.children, child.value, child.used)
    return Node(rest, {lower.tokens[0]: _behind(lower, below)}, value, used)


def _behind(node: Node[Value], below: Callable[[Value], Value]) -> Node[Value]:
    """A copy of a subtree in which the first values on any way down have been changed."""
    if node.value is not None:
        return Node(node.tokens, node.children, below(node.value), node.used)
    children = {first: _behind(child, below) for first, child in node.children.items()}
    return Node(node.tokens, children, None, node.used)
