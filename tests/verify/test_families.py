"""The page of model types: some of them tried again, and the page complete."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ithaca.engine.model.families import FAMILIES
from ithaca.verify.families import all_types, page, try_type

ROOT = Path(__file__).parents[2]
# others: tests/parity/test_any_decoder.py
EXACT = ["glm4_moe", "nemotron_h", "phi3"]
EXACT += ["gemma4_text", "qwen2_moe", "starcoder2"] if os.environ.get("ITHACA_FAMILIES") == "long" else []
REFUSED = {
    "llama4_text": r"layers\.2\.self_attn\.o_proj",  # positions counted from 0, whatever it is given
    "falcon": "its code works on the mask itself",
    "mamba": "MambaMixer scans channel by channel",
    "roberta": "position_embeddings",
}


@pytest.mark.parametrize("model_type", EXACT)
def test_exact(model_type: str):
    tried = try_type(model_type)
    assert tried.proof.exact, tried.proof
    assert 0 < tried.proof.error <= 1e-5


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type: str):
    tried = try_type(model_type)
    assert not tried.proof.exact
    assert re.search(REFUSED[model_type], str(tried.proof)), str(tried.proof)


def rows() -> dict[str, str]:
    text = (ROOT / "docs" / "reference" / "families.md").read_text()
    exact, _, refused = text.partition("## Refused")
    found = {name: "exact" for name in re.findall(r"^\| (\S+) \|", exact, re.M) if name != "type"}
    return found | {name: "refused" for name in re.findall(r"^\| (\S+) \|", refused, re.M) if name != "type"}


def test_the_page_names_every_type():
    """Of the pinned transformers; `make families` writes it anew."""
    found = rows()
    assert sorted(found) == all_types()
    assert all(found[name] == "exact" for name in (*EXACT, *FAMILIES))
    assert all(found[name] == "refused" for name in REFUSED)
    count = sum(state == "exact" for state in found.values())
    assert count >= 85
    first = re.search(r"\*\*(\d+) of (\d+)\*\*", (ROOT / "docs" / "reference" / "families.md").read_text())
    assert first and (int(first[1]), int(first[2])) == (count, len(found))
    said = re.search(r"(\d+) of (\d+) decoder types", (ROOT / "README.md").read_text())
    assert said and (int(said[1]), int(said[2])) == (count, len(found)), "README"


def test_a_page_of_a_few():
    text = page([try_type("llama"), try_type("mamba")])
    assert "**1 of 2** decoder types" in text and "| llama | LlamaForCausalLM | streamed, composed, module |" in text
    assert re.search(r"\| mamba \| MambaForCausalLM \| .*scans channel by channel", text)
