"""Units whose parts share what they begin with: the tree is that of the parts, batches are those of the engine's own trees, and
records that are trees are read, shown, or refused by file and line."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ithaca.base.files import sha256_of
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.data.batch import batch_from_rows
from ithaca.data.branches import shared_with, tree_of
from ithaca.data.folder import Packed
from ithaca.data.manifest import content_of
from ithaca.data.report import plan_words, summary
from ithaca.data.rows import Stream, open_rows
from ithaca.data.samples import why_apart
from ithaca.engine.batch import shard_batch
from ithaca.stack import Stack

from .make import mesh_of
from .test_batch import assert_equal
from .test_units import packed, pairs


def test_the_tree_of_the_page():
    assert tree_of([9, 8, 6], [0, 6, 3]) == [
        (0, 0, 3, None, False), (0, 3, 6, 0, False), (0, 6, 9, 1, True), (1, 6, 8, 1, True), (2, 3, 6, 0, True),
    ]  # fmt: skip


def test_every_part_is_a_way_through_its_tree():
    rng, branched = np.random.default_rng(0), 0
    for _ in range(300):
        parts = [rng.integers(0, 2, rng.integers(2, 12)) for _ in range(rng.integers(1, 7))]
        seen = [rng.random(len(part)) < 0.99 for part in parts]
        both = list(zip(parts, seen, strict=True))
        shared = [0, *(shared_with(*pair, learned=True) for pair in pairwise(both))]
        nodes = tree_of([len(part) for part in parts], shared)
        assert sum(node.stop - node.start for node in nodes) == sum(map(len, parts)) - sum(shared)
        leaves = [at for at, node in enumerate(nodes) if node.leaf]
        assert [nodes[leaf].part for leaf in leaves] == list(range(len(parts)))
        for part, leaf in enumerate(leaves):
            way, at = [], leaf
            while at is not None:
                way.insert(0, nodes[at])
                at = nodes[at].parent
            ids = np.concatenate([parts[node.part][node.start : node.stop] for node in way])
            assert ids.tolist() == parts[part].tolist()
            flags = np.concatenate([seen[node.part][node.start : node.stop] for node in way])
            assert flags.tolist() == seen[part].tolist()
        branched += any(node.parent is not None for node in nodes)
    assert branched > 90


def test_the_batch_of_the_engines_trees(tmp_path: Path):
    """Which moves the last token of a prompt into each answer, as it is learned there."""
    found = packed(tmp_path, pairs(40, 3))
    (rows,) = open_rows(found, 48, share=True, keep=False)
    (apart,) = open_rows(found, 48, keep=False)
    assert len(rows) < len(apart) and rows.plan.counts.shared == apart.plan.counts.tokens - rows.plan.counts.tokens > 0
    cases = 0
    for row in range(3):
        ids, labels, documents = [], [], []
        for chosen in rows.units(row).parts[::2].tolist():
            document = chosen // 2
            at, stop = (int(offset) for offset in found.offsets[document : document + 2])
            middle = at + int(found.parts(document)[1]["length"][0])
            seen = found.mask(at, stop)
            assert seen is not None
            whole, learned = (
                found.read(at, stop).tolist(),
                np.where(seen, found.read(at, stop).astype(int), -100).tolist(),
            )
            prompt = int(np.argmax(seen))
            shared, first = (prompt, len(documents)) if prompt > 1 else (0, None)
            documents += [(prompt, None)] * (first is not None)
            documents += [(middle - at - shared, first), (stop - middle - shared, first)]
            for into, values in ((ids, whole), (labels, learned)):
                into += values[: middle - at] + values[middle - at + shared :]
        padding = rows.documents(row)[len(documents) :]
        fill = sum(padding)
        given = torch.tensor([ids + [0] * fill]), torch.tensor([labels + [-100] * fill]), [documents + padding]
        for ulysses, ring in ((1, 1), (2, 1), (1, 2), (2, 2)):
            for rank in range(ulysses * ring):
                mesh, stack = mesh_of(ulysses, ring, 1, rank), Stack(ulysses=ulysses, ring=ring)
                ours = batch_from_rows(rows, [row], mesh, stack, 100)
                theirs = shard_batch(*given, mesh=mesh, stack=stack, vocabulary=100)
                assert_equal(ours, theirs)
                filled = [None] * len(padding)
                assert theirs.parents is not None and theirs.parents == [(ours.parents or [[]])[0] + filled][:1]
                assert theirs.weights is None and ours.weights is not None  # a prompt that is not learned
                assert torch.equal(ours.weights, (ours.labels != -100).float())
                cases += 1
    assert cases == 27


def node(said: Any, parent: int | None = None, **more: Any) -> dict[str, Any]:
    name = "text" if isinstance(said, str) else "input_ids" if isinstance(said[0], int) else "messages"
    return {name: said, "parent": parent, **more}


TREE = [
    node([1, 2, 3], train=False),
    node([4, 5], 0),
    node([6, 7, 8], 1),
    node([9], 1),
    node([4, 6], 0, train=False),
    node([7], 4),
]


def test_a_tree_is_its_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = packed(tmp_path, [{"nodes": TREE}, {"nodes": TREE[:2]}])
    assert [part["length"] for part in found.every_part] == [8, 6, 6, 5]  # pyright: ignore
    assert found.read(0, 20).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 7]
    seen = found.mask(0, 20)
    assert seen is not None and seen.astype(int).tolist() == [*[0] * 3, *[1] * 5, *[0] * 3, *[1] * 3, *[0] * 5, 1]
    assert found.shared(0) == [0, 4, 2] and found.lengths(share=True).tolist() == [14, 5]
    (rows,) = open_rows(found, 19, share=True)
    assert rows.plan.counts.shared == 6 and rows.supervised(0) == 5 + 3 + 1 + 2
    lines = plan_words("x", 19, rows.plan.counts, "split")
    assert lines[1] == "  shared prefixes: 19 of 25 tokens are computed, 24% fewer"
    batch = batch_from_rows(Stream([rows]), [0], mesh_of(1, 1, 1, 0), Stack(), 100)
    assert batch.weights is not None and int(batch.weights.sum()) == batch.supervised == 11
    assert batch.weights.max() == 2 and batch.longest == 8
    assert batch.documents is not None and batch.parents is not None and batch.positions.max() == 7
    assert main(["data", "inspect", str(tmp_path / "data.jsonl"), "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "kind tree (nodes)" in out and "node 0: 1 2 3\nnode 1, behind 0: ⟦4 5⟧\nnode 2, behind 1: ⟦6 7 8⟧" in out
    assert main(["data", "inspect", str(found.folder), "--context", "19"]) == 0
    out = capsys.readouterr().out
    assert "data.jsonl: tree, 2 documents" in out and "19 of 25 tokens are computed" in out


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "the column 'nodes' is empty; expected a list of nodes"),
        ("x", "the column 'nodes' is a str; expected a list of nodes"),
        ([node([1]), 5], "nodes[1] is a int; expected an object with one of messages, text, input_ids"),
        (
            [node([1]), node([2], 2), node([3], 1)],
            "nodes[1].parent is 2, which comes later; parents come before their children",
        ),
        ([node([1]), node([2], 1)], "nodes[1].parent is 1, which is the node itself"),
        ([node([1]), node([2], -1)], "nodes[1].parent is -1, which is no index"),
        ([node([1]), node([2], True)], "nodes[1].parent is True; expected the index of an earlier node"),
        ([node([1]), node([2])], "nodes[1] has no parent; only the first node is a root"),
        ([node([1], 0), node([2], 0)], "nodes[0].parent is 0; the first node is the root and has none"),
        ([node([1]), node("", 0)], "nodes[1] has text, and nodes[0] has input_ids; give the same in all nodes"),
        ([node("a"), node("", 0)], "nodes[1].text is empty; leave the node out"),
        ([node([1]), {"input_ids": [], "parent": 0}], "nodes[1].input_ids is empty; leave the node out"),
        ([node([1]), {"messages": [], "parent": 0}], "nodes[1] has messages, and nodes[0] has input_ids"),
        ([{"messages": []}], "nodes[0].messages is empty; leave the node out"),
        ([node([1]), {"input_ids": [2.5], "parent": 0}], "nodes[1].input_ids is [2.5]; expected a list of token ids"),
        ([node([1]), {"parent": 0}], "nodes[1] has nothing to say; expected one of messages, text, input_ids"),
        ([node([1]), node([2], 0, text="b")], "nodes[1] has text and input_ids; expected one of"),
        ([node([1]), node([2], 0, parents=3)], "nodes[1] has 'parents'; did you mean 'parent'?; known are"),
        ([node([1]), node([2], 0, train="no")], "nodes[1].train is 'no'; expected true or false"),
        ([node([1]), node([2], 0, reward=float("nan"))], "nodes[1].reward is nan; expected a finite number"),
        ([node([1], reward=1), node([2], 0)], "nodes[0].reward: other nodes go on from here; rewards belong to leaves"),
        ([node([1]), node([2], 0, reward=1), node([3], 0)], "nodes[2] is a leaf without a reward, and others have one"),
        (
            [node([1]), node([2], 0, reward=1)],
            "there are rewards, and no rewards in records before; give the same in all",
        ),
    ],
)
def test_bad_trees(tmp_path: Path, nodes: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'data.jsonl'}:2: ") + ".*" + re.escape(message)):
        packed(tmp_path, [{"nodes": TREE}, {"nodes": nodes}])
    assert not (tmp_path / "packed").exists()


def test_judged_trees_share_what_is_not_learned(tmp_path: Path):
    judged = [node([1, 2, 3], train=False), node([4, 5], 0), node([6, 7, 8], 1, reward=1), node([9], 1, reward=0)]
    found = packed(tmp_path, [{"nodes": judged}])
    assert found.manifest["sources"][0]["values"] == "rewards" and found.parts(0)[1]["value"].tolist() == [1, 0]
    assert found.shared(0) == [0, 2] and found.has_answers()


def test_where_the_first_ones_are_that_teach_nothing(tmp_path: Path):
    same, empty = {"prompt": [1], "chosen": [2], "rejected": [2]}, {"prompt": [1], "chosen": [], "rejected": [2]}
    found = packed(tmp_path, [same, *pairs(20), empty, *[same] * 4])
    words, path = "\n".join(summary(found)), tmp_path / "data.jsonl"
    assert f"pairs without a difference: {path}:1, {path}:23, {path}:24 …" in words
    assert f"with an empty answer or completion: {path}:22" in words
    equal = {"prompt": [1, 2], "completions": [[3, 4], [5]], "rewards": [1, 1]}
    (tmp_path / "equal").mkdir()
    with pytest.raises(ValueError, match=r"so there is nothing to learn \(first: .*data.jsonl:1, .*data.jsonl:2\)"):
        packed(tmp_path / "equal", [equal, equal])
    found = packed(tmp_path / "equal", [{**equal, "rewards": [1, 0]}, equal])
    assert f"so there is nothing to learn from them: {tmp_path / 'equal' / 'data.jsonl'}:2" in "\n".join(summary(found))


def test_numbers_of_shared_tokens_are_not_believed(tmp_path: Path):
    found = packed(tmp_path, pairs(8))
    path, manifest = found.folder / "shared.bin", json.loads((found.folder / "manifest.json").read_text())
    right = np.fromfile(path, np.int64)
    assert right.any()

    def written(values: np.ndarray | None) -> Packed:
        if values is None:
            path.unlink()
            del manifest["files"]["shared.bin"]
        else:
            values.tofile(path)
            manifest["files"]["shared.bin"]["sha256"] = sha256_of(path)
        manifest["content"] = content_of({n: a["sha256"] for n, a in manifest["files"].items()})
        (found.folder / "manifest.json").write_text(json.dumps(manifest))
        return Packed(found.folder)

    for at, value in ((0, 1), (1, -1), (1, 1 << 40), (3, int(found.parts(1)[1]["length"].min()) - 1)):
        wrong = right.copy()
        wrong[at] = value
        with pytest.raises(ValueError, match=r"shared.bin and parts.bin do not agree; pack the data again"):
            written(wrong)
    old = written(None)  # as folders were before
    assert not old.knows_shared and open_rows(old, 48, share=True)[0].plan.counts.shared == 0
    model = tmp_path / "model"
    config = load(
        None, [f"model.folder={model}", f"data.packed={old.folder}", "data.context=48", "train.steps=1"]
    ).config
    assert "was packed before this was written down; pack the data again" in (why_apart(config, old) or "")


def test_a_plan_says_what_packed_data_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = packed(tmp_path, [{"prompt": [*range(60)], "chosen": [at, 1], "rejected": [at, 2]} for at in range(9)])
    run = tmp_path / "run.yaml"
    run.write_text(f"""
model: {{folder: llama32_1b, lora: {{rank: 8}}}}
data: {{context: 64K, packed: {found.folder}}}
train: {{steps: 10}}
stack: {{tile: 4K}}
""")

    def planned(*words: str) -> str:
        assert main(["plan", *words, "--gpus", "1xH200"]) == 0
        return capsys.readouterr().out

    said = planned(str(run), "--objective", "dpo")
    words = "48% fewer tokens, 45% fewer pairs in attention, than each answer by itself"
    assert words in said and re.search(r"objective +dpo +--objective", said)
    assert words not in planned(str(run), "--objective", "dpo", "--data.share_prefixes", "off")
    model = ["llama32_1b", "--context", "64K", "--lora", "8", "--stack.tile", "4K", "--json"]
    plain, dpo, policy = (json.loads(planned(*model, "--objective", kind)) for kind in ("sft", "dpo", "policy"))
    seconds = [each["time"]["step"] for each in (plain, policy, dpo)]
    assert seconds == sorted(
        set(seconds)
    )  # log-probabilities are made again in backward; and the base scores every row
    assert main(["plan", *model, "--gpus", "1xH200", "--objective", "x"]) == 2
    assert "--objective 'x' is unknown; choose one of sft, dpo, policy" in capsys.readouterr().err
