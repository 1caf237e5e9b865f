"""What the parts of a unit begin with alike, and the tree that comes of it.

On disk every part is whole (folder.py). Beside it stands one number: how many of its first tokens need not be computed again
behind the part before it. These numbers are the whole tree, as the parts of a unit come depth first:

    part 0    a a a a b b b c c        shares 0
    part 1    a a a a b b b d          shares 6
    part 2    a a a a e e              shares 3

    nodes     a a a | a b b | b c c    0:3 of part 0, 3:6 of part 0, 6:9 of part 0
                            | b d      6:8 of part 1
                    | a e e            3:6 of part 2

The last token that two parts have in common is left to each of them: it predicts the first one in which they differ
(engine/trees.py). So a node is a range of one part, and the label of its last token is the next token of that part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Node(NamedTuple):
    part: int  # whose tokens they are
    start: int  # in that part
    stop: int
    parent: int | None = None  # an earlier node
    leaf: bool = True  # the part ends with it


def shared_with(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], *, learned: bool) -> int:
    """Tokens of a part that need not be computed again behind another; both ids and what is supervised. learned: supervised tokens
    can be shared, too; otherwise only what comes before the first of them."""
    length = min(len(one[0]), len(other[0])) - 1  # the last token of a part is its own
    differ = (one[0][:length] != other[0][:length]) | (one[1][:length] != other[1][:length])
    if not learned:
        differ |= one[1][:length]
    alike = int(np.argmax(differ)) if differ.any() else length
    return max(0, alike - 1)


def tree_of(lengths: list[int], shared: list[int]) -> list[Node]:
    """The nodes of a unit, depth first. The leaf of each part comes in the order of the parts."""
    roots: list[_Growing] = []
    path: list[_Growing] = []  # to the leaf of the part before
    for part, (length, alike) in enumerate(zip(lengths, shared, strict=True)):
        leaf = _Growing(part, alike, length)
        while path and path[-1].start >= alike:
            path.pop()
        if path and path[-1].stop > alike:
            path[-1].split(alike)
        (path[-1].children if path else roots).append(leaf)
        path.append(leaf)
    nodes: list[Node] = []
    waiting: list[tuple[_Growing, int | None]] = [(root, None) for root in reversed(roots)]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(nodes)) for child in reversed(node.children)]
        nodes.append(Node(node.part, node.start, node.stop, parent, not node.children))
    return nodes


class _Growing:
    def __init__(self, part: int, start: int, stop: int) -> None:
        self.part, self.start, self.stop = part, start, stop
        self.children: list[_Growing] = []

    def split(self, at: int) -> None:
        below = _Growing(self.part, at, self.stop)
        below.children, self.children, self.stop = self.children, [below], at
