"""Our chat templates: what they render is what the models' own render, and every turn of the assistant is marked."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from ithaca.cli.main import main
from ithaca.data.chat import render_chat
from ithaca.data.chat_template import render
from ithaca.data.pack import pack
from ithaca.data.report import summary
from ithaca.data.source import Source
from ithaca.data.templates import MARKERS, shipped, template_text, twin_of
from ithaca.data.tokenizer import check_tokenizer, load_tokenizer

from .make import CHATML, byte_level, chat, save_tokenizer, write_jsonl
from .test_formats import said

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
THINKING = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nfour"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALLING = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "seven"},
]
CALLED = (
    "<|im_start|>user\none<|im_end|>\n"
    '<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    "<|im_end|>⟧\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nseven<|im_end|>⟧\n"
)
# What each model's own template gives for these, written down; ⟦ ⟧ is what is learned.
RENDERED: dict[str, list[tuple[Any, Any, str]]] = {
    "qwen3": [
        (
            THINKING,
            None,
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n<|im_start|>user\nthree<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nso\n</think>\n\nfour<|im_end|>⟧\n",
        ),
        (CALLING, None, "<|im_start|>system\nbe kind<|im_end|>\n" + CALLED),
        (
            CALLING,
            TOOLS,
            "<|im_start|>system\nbe kind\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou "
            "are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            '{"type": "function", "function": {"name": "look", "parameters": {}}}\n</tools>\n\nFor each function call, return a '
            "json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' + CALLED,
        ),
    ],
    "chatml": [
        (
            chat(" a\n", "b "),
            None,
            "<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\n⟦b <|im_end|>⟧\n",
        )
    ],
    "llama3": [
        (
            chat(" a\n", "b "),
            None,
            "<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            "⟦b<|eot_id|>⟧",
        )
    ],
    "gemma": [
        (
            [{"role": "system", "content": "s"}, *chat(" a\n", "b ")["messages"]],
            None,
            "<s><start_of_turn>user\ns\n\na<end_of_turn>\n<start_of_turn>model\n⟦b<end_of_turn>⟧\n",
        )
    ],
}


def unmarked(name: str) -> str:
    """As a model would have it: the same text, and no marks."""
    return re.sub(r"\{%- (end)?generation %\}", "", shipped(name))


def marked(text: str, spans: list[tuple[int, int]]) -> str:
    for begin, end in reversed(spans):
        text = f"{text[:begin]}⟦{text[begin:end]}⟧{text[end:]}"
    return text


def save_qwen(folder: Path, template: str, eos: str = "<|im_end|>") -> Path:
    """A tokenizer with the markers of Qwen3: those of turns are special, those of thoughts are not."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return save_tokenizer(folder, tokenizer, template=template, eos_token=eos)


@pytest.mark.parametrize("name", MARKERS)
def test_what_is_rendered_and_marked(name: str):
    for messages, tools, expected in RENDERED[name]:
        messages = messages["messages"] if isinstance(messages, dict) else messages
        assert marked(*render_chat(messages, shipped(name), TOKENS, tools)) == expected
        # an end of the markers, and no newline behind it, is learned
        text, spans = render_chat(messages, shipped(name), TOKENS, tools)
        assert all(text[:end].endswith(MARKERS[name][-1]) for _, end in spans)
        assert template_text(name) == shipped(name)
    _, prompt = render(shipped(name), [{"role": "user", "content": "x"}], None, TOKENS, prompt=True, mark=True)
    assert prompt == []


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the models' own templates come with the package trl"
)
@pytest.mark.parametrize(("name", "own"), [("qwen3", "qwen3"), ("llama3", "llama3"), ("gemma", "gemma3")])
def test_random_chats_are_rendered_as_by_the_models_own(name: str, own: str):
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None
    theirs = (Path(package.origin).parent / "chat_templates" / f"{own}.jinja").read_text()
    assert twin_of(theirs, TOKENS) == name
    rng, texts = (
        random.Random(0),
        ["a", "\nb\n", "<think>\nx\n</think>\n\ny", "", "<tool_response>\nz</tool_response>", " s "],
    )
    seen = set()
    for _ in range(150):
        messages: list[dict[str, Any]] = [
            {"role": ("user", "assistant")[at % 2], "content": rng.choice(texts)} for at in range(rng.randint(1, 6))
        ]
        if rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "s"})
        if name == "qwen3":
            for message in messages[1:]:
                message["role"] = rng.choice(["user", "assistant", "tool", "system"])
                if rng.random() < 0.3:
                    message |= {"reasoning_content": "\nr", "tool_calls": [{"name": "f", "arguments": {"a": 1}}] * 2}
        args: Any = (messages, rng.choice([None, TOOLS]) if name == "qwen3" else None, TOKENS)
        prompt = rng.random() < 0.3
        ours, wanted = (render(each, *args, prompt=prompt, mark=False)[0] for each in (shipped(name), theirs))
        assert ours == wanted
        seen.add(ours)
    assert len(seen) > 100


def test_which_template_is_like_ours():
    for name in MARKERS:
        assert twin_of(unmarked(name), TOKENS) == name
    assert twin_of(CHATML, TOKENS) is None  # another header
    assert twin_of(unmarked("chatml") + "{{ raise_exception('never') }}", TOKENS) is None
    assert twin_of(unmarked("qwen3").replace("loop.last or", ""), TOKENS) is None  # no empty block: another model


def test_a_twin_marks_only_what_it_renders_the_same():
    """By prefixes the first chat is refused; with the twin it is marked; where the twin writes anything else, it does not count."""
    own = unmarked("qwen3")
    with pytest.raises(ValueError, match="renders message 1 differently once others follow"):
        render_chat(THINKING, own, TOKENS)
    text, spans = render_chat(THINKING, own, TOKENS, None, shipped("qwen3"))
    assert text == render(own, THINKING, None, TOKENS, prompt=False, mark=False)[0]
    assert marked(text, spans) == RENDERED["qwen3"][0][2]
    dated = own.replace("{{- '<|im_start|>system\\n' + system", "{{- '<|im_start|>system\\ntoday: ' + system")
    assert twin_of(dated, TOKENS) == "qwen3"  # no probe has a system message
    with pytest.raises(ValueError, match="differently once others follow"):
        render_chat([CALLING[0], *THINKING], dated, TOKENS, None, shipped("qwen3"))


def test_packed_with_a_twin_and_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The chat of a model whose own template cannot mark turns: recognised, said, and the same as by name."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": THINKING}, chat("a <|im_end|> b", "c", "d", "e")])
    folder = save_qwen(tmp_path / "own", unmarked("qwen3"))
    options: Any = {"tokenizer": str(folder), "workers": 1, "quiet": True}
    packed = pack([Source(str(path))], tmp_path / "p", **options)
    found = said(packed, folder)
    assert [learned for _, learned in found] == [
        "two<|im_end|><think>\nso\n</think>\n\nfour<|im_end|>",
        "c<|im_end|><think>\n\n</think>\n\ne<|im_end|>",
    ]
    loaded = load_tokenizer(folder)
    assert found[0][0] == loaded.apply_chat_template(THINKING, tokenize=False)
    assert packed.manifest["sources"][0]["marked_by"] == "qwen3"
    assert any("ours of the name qwen3, which renders the same, does" in line for line in summary(packed))
    assert main(["data", "inspect", str(path), "--tokenizer", str(folder)]) == 0
    assert "ours of the name qwen3" in capsys.readouterr().out
    # by name: in place of the tokenizer's, for one source
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    other = save_qwen(tmp_path / "other", CHATML)
    sources = [Source(str(path), chat_template="qwen3"), Source(str(tmp_path / "b.jsonl"), chat_template="chatml")]
    named = pack(sources, tmp_path / "named", **{**options, "tokenizer": str(other)})
    assert said(named, other)[:2] == found and "hm" in said(named, other)[2][1]
    assert [source["marked_by"] for source in named.manifest["sources"]] == [None, None]
    check_tokenizer(
        named, load_tokenizer(save_qwen(tmp_path / "third", "{{ 1 }}"))
    )  # whose template nothing was rendered with


def test_refused(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")])
    text = write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    for source, message in (
        (
            Source(str(path), chat_template="qwen3"),
            r"'qwen3' writes '<\|im_start\|>', which is no token of this tokenizer",
        ),
        (
            Source(str(path), chat_template="qwen4"),
            "neither one of ours nor a file that can be read .* did you mean 'qwen3'",
        ),
        (Source(str(text), chat_template="chatml"), "chat_template is for chats, and this is text; leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([source], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)


def test_the_newline_behind_a_turn_is_never_learned(tmp_path: Path):
    """Wherever the template has it: in its marks, or in what prefixes find. The end token is, and blanks that were said."""
    inside = CHATML.replace(
        "{{ m['content'] }}<|end|>\n", "{% generation %}{{ m['content'] }}<|end|>\n{% endgeneration %}"
    )
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b \n")])
    for name, template in (("a", inside), ("b", CHATML), ("c", CHATML.replace("<|end|>", ""))):
        folder = save_tokenizer(tmp_path / name, template=template)
        packed = pack([Source(str(path))], tmp_path / f"p{name}", tokenizer=str(folder), workers=1, quiet=True)
        ((_, learned),) = said(packed, folder)
        # without an end token the newline is what ends a turn
        assert learned == {"a": "a<|end|>b \n<|end|>", "b": "b \n<|end|>", "c": "b \n\n"}[name]
