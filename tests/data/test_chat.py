"""Chats: the text is the template's, and exactly the assistant's tokens are supervised."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ithaca.data.chat import render_chat
from ithaca.data.encode import Encoder
from ithaca.data.folder import Packed
from ithaca.data.formats import check_messages
from ithaca.data.look import look
from ithaca.data.pack import pack
from ithaca.data.render import encode_text, inside
from ithaca.data.source import Source
from ithaca.data.tokenizer import load_tokenizer, tokenizer_parts

from .make import CHANGING, CHATML, MARKED, chat, save_tokenizer, words, write_jsonl

TALK = chat("hello there", "good day", "and\nnow?", "  spaces around  ")["messages"]


def said(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_text_is_that_of_apply_chat_template(tmp_path: Path, template: str):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    text, _ = render_chat(TALK, template, {})
    assert text == tokenizer.apply_chat_template(TALK, tokenize=False)


def test_spans_by_prefixes():
    text, spans = render_chat(TALK, CHATML, {})
    assert said(text, spans) == ["good day<|end|>\n", "  spaces around  <|end|>\n"]


def test_spans_by_marks():
    text, spans = render_chat(TALK, MARKED, {})
    assert said(text, spans) == ["good day<|end|>", "  spaces around  <|end|>"]


def test_several_assistant_turns_in_a_row_and_at_the_start():
    messages = [{"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "again"}, TALK[0]]
    text, spans = render_chat(messages, CHATML, {})
    # nothing comes before the first turn, so its header is part of what the assistant says
    assert said(text, spans) == ["<|start|>assistant\nhi<|end|>\n", "again<|end|>\n"]


def test_a_chat_without_the_assistant_has_no_spans():
    assert render_chat(TALK[:1], CHATML, {})[1] == [] and render_chat(TALK[:1], MARKED, {})[1] == []


def test_a_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(ValueError, match=r"renders message 1 differently once others follow.*\{% generation %\}"):
        render_chat(TALK, CHANGING, {})
    # with a single turn it is no problem; what only the last turn gets is the assistant's
    text, spans = render_chat(TALK[:2], CHANGING, {})
    assert said(text, spans) == ["<think></think>good day<|end|>\n"]


def test_special_tokens_and_tools_reach_the_template():
    template = (
        "{{ bos_token }}{% if tools %}{{ tools[0].name }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    text, _ = render_chat(TALK[:1], template, {"bos_token": "<s>"}, [{"name": "search"}])
    assert text == "<s>searchhello there"


def test_a_template_may_refuse():
    with pytest.raises(ValueError, match="the chat template refuses this chat: roles must alternate"):
        render_chat(TALK, "{{ raise_exception('roles must alternate') }}", {})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_supervised_tokens_are_those_of_the_spans(tmp_path: Path, template: str):
    parts = tokenizer_parts(load_tokenizer(save_tokenizer(tmp_path, template=template)))
    text, spans = render_chat(TALK, template, {})
    pieces = list(encode_text(text, spans, Encoder(parts, parse=True), eos=True, chat=True))
    ids = np.concatenate([ids for ids, _ in pieces])
    seen = np.concatenate([seen for _, seen in pieces])
    loaded = load_tokenizer(tmp_path)
    assert ids.tolist() == loaded.apply_chat_template(TALK, return_dict=True)["input_ids"]  # no end token added
    runs = np.split(ids, np.flatnonzero(np.diff(seen)) + 1)
    assert [loaded.decode(run) for run in runs][1::2] == said(text, spans)


def test_marked_turns_are_those_of_transformers(tmp_path: Path):
    """Where no turn begins or ends with a space; there transformers loses the turn."""
    loaded = load_tokenizer(save_tokenizer(tmp_path, template=MARKED))
    messages = chat("hello there", "good day", "and\nnow?", "well, then")["messages"]
    theirs = loaded.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    text, spans = render_chat(messages, MARKED, {})
    ((ids, seen),) = encode_text(text, spans, Encoder(tokenizer_parts(loaded), parse=True), eos=True, chat=True)
    assert seen is not None
    assert ids.tolist() == theirs["input_ids"] and seen.astype(int).tolist() == theirs["assistant_masks"]


def test_inside():
    places = np.array([[0, 1], [1, 2], [2, 3], [3, 5], [5, 8], [8, 9], [9, 9]])
    assert inside(places, [(1, 3), (5, 6)]).tolist() == [False, True, True, False, True, False, False]
    assert inside(places, [(4, 4), (4, 6), (9, 10)]).tolist() == [False, False, False, True, True, False, True]
    assert not inside(places, []).any() and not inside(places, [(4, 4)]).any()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "the column 'messages' is a str; expected a list of messages"),
        ([], "the column 'messages' is empty"),
        (["hello"], "messages[0] is a str; expected an object with 'role' and 'content'"),
        ([{"content": "x"}], "messages[0] has no 'role'; it has 'content'"),
        ([TALK[0], {"role": "user", "text": "x"}], "messages[1] (user) has no 'content'; it has 'role', 'text'"),
        ([{"role": "user", "content": 5}], "messages[0].content (user) is a int; expected a text"),
        ([{"from": "human", "value": "x"}], "(ShareGPT: kind: sharegpt, columns: {conversations: messages})"),
        ([{**TALK[1], "weight": 0.5}], "messages[0].weight is 0.5; expected 1, or 0 for a turn that is not learned"),
    ],
)
def test_refused(messages, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_messages(messages, "messages")


def test_a_word_that_the_header_begins_is_learned_and_shown(tmp_path: Path):
    """The header ends with a blank, of which this tokenizer makes one token with the first word of the answer."""
    answer = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    template = "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{{ m.content }} {% else %}" + answer
    template += "{% endif %}{% endfor %}"
    folder = save_tokenizer(tmp_path / "tokenizer", template=template)
    loaded = load_tokenizer(folder)
    answers = [words(3, 1), words(1, 1) + " quotes <|end|>"]
    assert loaded.tokenize(" " + answers[0])[0][:2] == "Ġf" != loaded.tokenize(answers[0])[0]
    write_jsonl(tmp_path / "a.jsonl", [chat("say it", each) for each in answers])
    source = Source(str(tmp_path / "a.jsonl"))
    pack([source], tmp_path / "packed", tokenizer=str(folder))
    packed, shown = Packed(tmp_path / "packed"), look(source, 2, str(folder))["sample"]
    for document, (example, answer) in enumerate(zip(shown, answers, strict=True)):
        begin, end = (int(at) for at in packed.offsets[document : document + 2])
        ids, seen = packed.read(begin, end), packed.mask(begin, end)
        assert seen is not None
        learned = loaded.decode(ids[seen.astype(bool)])
        assert learned == f" {answer}<|end|>", "the blank is in the first token"
        assert [part["text"] for part in example["parts"] if part["supervised"]] == [learned]
        assert "".join(part["text"] for part in example["parts"]) == loaded.decode(ids)
