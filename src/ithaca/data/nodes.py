"""Records that are trees: what an agent did, with its branches.

    {"nodes": [{"messages": [{"role": "user", ...}]},
               {"messages": [{"role": "assistant", ...}], "parent": 0},
               {"messages": [{"role": "assistant", ...}], "parent": 0, "train": false}]}

A node is `messages`, a `text`, or token ids (`input_ids`), all nodes of a tree the same. `parent` is the index of an earlier node,
so no way leads back; the first node has none. `train: false`: not learned. Every way from the root to a leaf is a document,
rendered and tokenised as it would be alone; what documents begin with alike is found in their tokens (branches.py). So a node's
tokens count once for every leaf below it. With a `reward` at each leaf, the ways are completions that were sampled and judged.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

from .formats import Chat, check_messages, get, is_ids, short, tools_of, type_of
from .source import Source, did_you_mean

_SAYS = ("messages", "text", "input_ids")
_KEYS = (*_SAYS, "parent", "train", "reward")


class Said(NamedTuple):
    """Texts, or lists of token ids, one behind the other, and which of them are learned."""

    pieces: list[Any]
    learned: list[bool]


class Ways(NamedTuple):
    """From the root to each leaf, depth first."""

    examples: list[Chat | Said]
    values: list[float] | None  # rewards


def read_ways(record: dict[str, Any], source: Source) -> Ways:
    column, nodes = source.column("nodes"), read_nodes(record, source)
    below: list[list[int]] = [[] for _ in nodes]
    for at, node in enumerate(nodes[1:], 1):
        below[node["parent"]].append(at)
    leaves = [at for at in range(len(nodes)) if not below[at]]
    judged = [at for at in range(len(nodes)) if nodes[at].get("reward") is not None]
    for at in judged:
        if below[at]:
            raise ValueError(f"{column}[{at}].reward: other nodes go on from here; rewards belong to leaves")
    if judged and len(judged) < len(leaves):
        lacks = min(set(leaves) - set(judged))
        raise ValueError(
            f"{column}[{lacks}] is a leaf without a reward, and others have one; give all leaves one, or none"
        )
    examples, values = [], []
    waiting = [[0]]
    while waiting:
        way = waiting.pop()
        waiting += [[*way, child] for child in reversed(below[way[-1]])]
        if not below[way[-1]]:
            examples.append(_example([nodes[at] for at in way], record, source))
            values.append(float(nodes[way[-1]].get("reward") or 0))
    return Ways(examples, values if judged else None)


def read_nodes(record: dict[str, Any], source: Source) -> list[dict[str, Any]]:
    """The nodes of a record. ValueError says what is wrong with which."""
    column, nodes = source.column("nodes"), get(record, source, "nodes")
    if not isinstance(nodes, list) or not nodes:
        found = "empty" if nodes == [] else type_of(nodes)
        raise ValueError(
            f"the column {column!r} is {found}; expected a list of nodes, each with one of {', '.join(_SAYS)}"
        )
    kinds = []
    for at, node in enumerate(nodes):
        where = f"{column}[{at}]"
        if not isinstance(node, dict):
            raise ValueError(f"{where} is {type_of(node)}; expected an object with one of {', '.join(_SAYS)}")
        for name in node:
            if name not in _KEYS:
                raise ValueError(f"{where} has {name!r}{did_you_mean(name, _KEYS)}; known are {', '.join(_KEYS)}")
        said = [name for name in _SAYS if node.get(name) is not None]
        if len(said) != 1:
            raise ValueError(
                f"{where} has {' and '.join(said) or 'nothing to say'}; expected one of {', '.join(_SAYS)}"
            )
        kinds.append(said[0])
        if said[0] != kinds[0]:
            raise ValueError(f"{where} has {said[0]}, and {column}[0] has {kinds[0]}; give the same in all nodes")
        _check_said(node[said[0]], said[0], where)
        _check_parent(node.get("parent"), at, where)
        if not isinstance(node.get("train"), bool | None):
            raise ValueError(f"{where}.train is {short(node['train'])}; expected true or false")
        reward = node.get("reward")
        if reward is not None and (
            isinstance(reward, bool) or not isinstance(reward, int | float) or not isfinite(reward)
        ):
            raise ValueError(f"{where}.reward is {short(reward)}; expected a finite number")
    return nodes


def _check_said(said: Any, name: str, where: str) -> None:
    if name == "messages":
        if said == []:
            raise ValueError(
                f"{where}.messages is empty; leave the node out, and let its children go on from its parent"
            )
        check_messages(said, f"{where}.messages")
        return
    if not (isinstance(said, str) if name == "text" else said == [] or is_ids(said)):
        raise ValueError(
            f"{where}.{name} is {short(said)}; expected a {'text' if name == 'text' else 'list of token ids'}"
        )
    if not said:
        raise ValueError(f"{where}.{name} is empty; leave the node out, and let its children go on from its parent")


def _check_parent(parent: Any, at: int, where: str) -> None:
    if at == 0:
        if parent is not None:
            raise ValueError(f"{where}.parent is {short(parent)}; the first node is the root and has none")
        return
    if parent is None:
        raise ValueError(
            f"{where} has no parent; only the first node is a root. Write another tree as a record of its own"
        )
    if isinstance(parent, bool) or not isinstance(parent, int):
        raise ValueError(f"{where}.parent is {short(parent)}; expected the index of an earlier node")
    if not 0 <= parent < at:
        why = "is the node itself" if parent == at else "comes later" if parent > at else "is no index"
        raise ValueError(
            f"{where}.parent is {parent}, which {why}; parents come before their children, so that no way leads back: give an "
            f"index from 0 to {at - 1}"
        )


def _example(way: list[dict[str, Any]], record: dict[str, Any], source: Source) -> Chat | Said:
    trained = [node.get("train") is not False for node in way]
    name = next(name for name in _SAYS if way[0].get(name) is not None)
    if name != "messages":
        return Said([node[name] for node in way], trained)
    both = [
        (message, wanted and message.get("weight") != 0)
        for node, wanted in zip(way, trained, strict=True)
        for message in node["messages"]
    ]
    messages = [{key: value for key, value in message.items() if key != "weight"} for message, _ in both]
    return Chat(messages, tools_of(record, source), [wanted for _, wanted in both])
