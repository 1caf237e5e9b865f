"""Records as people have them: each way to write a conversation says the same, and what is wrong is said with its place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli.main import main
from ithaca.config import load
from ithaca.data.formats import Chat, Pair, read_example, read_preference
from ithaca.data.pack import pack
from ithaca.data.source import Source, sources_of
from ithaca.data.tokenizer import check_tokenizer, load_tokenizer

from .make import MARKED, save_tokenizer, write_jsonl
from .test_cli_data import run
from .test_pack import documents, masks

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
ALPACA = {"instruction": "hi", "output": "ho"}
WORSE = {"role": "assistant", "content": "no"}


def example(kind: str, record: dict[str, Any], template: bool = True, **columns: str) -> Any:
    return read_example(record, kind, Source("x", columns=columns), template=template)


def said(packed: Any, tokenizer: Path) -> list[tuple[str, str]]:
    """Every document, and what of it is learned."""
    loaded, found = load_tokenizer(tokenizer), []
    for ids, mask in zip(documents(packed), masks(packed), strict=True):
        learned = [token for token, seen in zip(ids, mask or [True] * len(ids), strict=True) if seen]
        found.append((loaded.decode(ids), loaded.decode(learned)))
    return found


# An array of records, as many datasets come.


def test_an_array_of_records(tmp_path: Path, tokenizer: Path):
    (tmp_path / "alpaca.json").write_text(json.dumps([ALPACA, {**ALPACA, "output": "hum"}], indent=1))
    packed = pack([Source(str(tmp_path / "*.json"))], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)
    assert [learned for _, learned in said(packed, tokenizer)] == ["ho<|end|>", "hum<|end|>"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": 2}', "a.json:2: not valid JSON at column 1: Extra data; it has more behind its first value"),
        ('{"data": []}', "is JSON of a dict, not an array of records"),
        ("[]", "a.json has no record: its array is empty"),
        ('[{"text": "x"}, 3]', "a.json, record 2 is a int, not an object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_array_of_records(tmp_path: Path, tokenizer: Path, text: str, said: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        pack([Source(str(tmp_path / "a.json"))], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)


def test_a_folder_takes_no_json_unless_asked(tmp_path: Path, tokenizer: Path):
    (tmp_path / "d").mkdir()
    write_jsonl(tmp_path / "d" / "a.jsonl", [ALPACA])
    (tmp_path / "d" / "dataset_infos.json").write_text("{}")
    packed = pack([Source(str(tmp_path / "d"))], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)
    assert len(documents(packed)) == 1


# One conversation in every format.

SAME = {
    "chat": {"messages": [USER, ANSWER]},
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "completion": {"prompt": [USER], "completion": [ANSWER]},
    "preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
}


@pytest.mark.parametrize("kind", SAME)
def test_one_conversation_in_every_format(tmp_path: Path, tokenizer: Path, kind: str):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": 7, **SAME[kind]}])
    source = Source(str(path), use="chosen" if kind == "preference" else None)
    packed = pack([source], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)
    assert said(packed, tokenizer) == [
        ("<|start|>user\nhi<|end|>\n<|start|>assistant\nho<|end|>\n", "ho<|end|>"),
    ]
    (about,) = packed.manifest["sources"]
    assert (about["kind"], about["chats"]) == (kind, 1)
    with pytest.raises(ValueError, match="chat template differ"):  # it rendered this, so it is part of the data
        other = save_tokenizer(tmp_path / "other", template=MARKED)
        check_tokenizer(packed, load_tokenizer(other))


def test_sharegpt():
    turns = [
        {"from": "system", "value": "be kind"},
        {"from": "user", "value": "what is it?"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "three", "weight": 0},
        {"from": "human", "value": "sure?"},
        {"from": "assistant", "value": "yes", "weight": 1},
    ]
    found = example("sharegpt", {"conversations": turns, "tools": '[{"name": "look"}]'})
    assert [message["role"] for message in found.messages] == (
        ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    assert found.messages[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert found.tools == [{"name": "look"}] and found.messages[4] == {"role": "assistant", "content": "three"}
    assert found.learned == [True, True, True, True, False, True, True] and not found.all_learned
    # the system message in a column of its own, and messages in the place of turns
    found = example("sharegpt", {"talk": [USER, ANSWER], "system": "be kind"}, conversations="talk")
    assert found == Chat([{"role": "system", "content": "be kind"}, USER, ANSWER], None, [True] * 3)
    assert example("sharegpt", {"conversations": []}) == Chat([], None, [])


def test_alpaca():
    assert example("alpaca", {**ALPACA, "input": ""}).messages == [USER, ANSWER]
    full = {**ALPACA, "input": "there", "system": "be kind", "history": [["a", "b"]]}
    assert [message["content"] for message in example("alpaca", full).messages] == [
        "be kind",
        "a",
        "b",
        "hi\nthere",
        "ho",
    ]
    # without a chat template: the words of Alpaca
    prompt, completion = example("alpaca", ALPACA, template=False)
    assert completion == "ho" and prompt.endswith("request.\n\n### Instruction:\nhi\n\n### Response:\n")
    prompt, _ = example("alpaca", {**ALPACA, "input": "there"}, template=False)
    assert ", paired with an input" in prompt and prompt.endswith("hi\n\n### Input:\nthere\n\n### Response:\n")
    with pytest.raises(ValueError, match="the column 'history' needs a chat template"):
        example("alpaca", {**ALPACA, "history": [["a", "b"]]}, template=False)


def test_alpaca_without_a_chat_template_ends_with_the_end_token(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "tokenizer", template=None)
    path = write_jsonl(tmp_path / "a.jsonl", [ALPACA])
    packed = pack([Source(str(path))], tmp_path / "p", tokenizer=str(folder), workers=1, quiet=True)
    ((_, learned),) = said(packed, folder)
    assert learned == "ho</s>" and packed.manifest["sources"][0]["chats"] == 0


def test_completions_of_messages_learn_the_completion_only(tmp_path: Path):
    """Of texts too; and a turn of the assistant in the prompt is not learned, by marks and by prefixes."""
    record = {"prompt": [USER, WORSE, USER], "completion": [ANSWER]}
    for name, template in (("a", None), ("b", MARKED)):
        folder = save_tokenizer(tmp_path / name, **({} if template is None else {"template": template}))
        path = write_jsonl(tmp_path / f"{name}.jsonl", [record, {"prompt": "hi", "completion": " ho"}])
        packed = pack([Source(str(path))], tmp_path / f"p{name}", tokenizer=str(folder), workers=1, quiet=True)
        assert [learned for _, learned in said(packed, folder)] == ["ho<|end|>", " ho</s>"]
        assert packed.manifest["sources"][0]["chats"] == 1
    # the whole conversation as completion
    assert example("completion", {"prompt": [USER], "completion": [USER, ANSWER]}).messages == [USER, ANSWER]
    twice = MARKED.replace("{% generation %}", "{% generation %}x{% endgeneration %}{% generation %}")
    folder = save_tokenizer(tmp_path / "c", template=twice)
    with pytest.raises(
        ValueError, match=r"b.jsonl:1: the chat template marks 4 turns of the assistant where there are 2"
    ):
        pack([Source(str(tmp_path / "b.jsonl"))], tmp_path / "pc", tokenizer=str(folder), workers=1, quiet=True)


def test_preferences():
    def both(record: dict[str, Any]) -> Any:
        return read_preference(record, Source("x"))

    texts = {"prompt": "hi ", "chosen": "ho", "rejected": "no"}
    assert both(texts) == (Pair("hi ", "ho"), Pair("hi ", "no"))
    wanted = (Chat([USER, ANSWER], None, [False, True]), Chat([USER, WORSE], None, [False, True]))
    whole = {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]}
    assert both(whole) == both({**whole, "prompt": "hi"}) == both({**whole, "prompt": [USER]}) == wanted
    assert both({"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]}) == wanted
    for record, message in (
        ({**whole, "prompt": "other"}, "the column 'prompt' is not the message before the answers in 'chosen'"),
        ({"chosen": [ANSWER], "rejected": [WORSE]}, "have no first message in common"),
        ({"chosen": "ho", "rejected": "no"}, "there is no 'prompt', so where the answers begin is not known"),
        (
            {"chosen": "ho", "rejected": [WORSE]},
            "'chosen' is a str and 'rejected' is a list; expected two texts or two",
        ),
        (
            {**texts, "prompt": [USER]},
            "the column 'prompt' is a list and 'chosen' is a str; expected two texts, or two",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            both(record)


def test_which_answer_is_said_for_preferences_only(tmp_path: Path, tokenizer: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi ", "chosen": "ho", "rejected": "no"}])
    for more, message in (
        ({"kind": "text", "columns": {"text": "chosen"}, "use": "chosen"}, "use is for preferences, and this is text"),
        ({"use": "rejected"}, "use 'rejected' is unknown; choose one of chosen"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([Source(str(path), **more)], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)
    assert not (tmp_path / "p").exists()


# What is wrong with a record: file, line, field, and what was expected.


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": "hi"}, "the column 'conversations' is a str; expected a list of turns, each with 'from'"),
        ({"conversations": [3]}, "conversations[0] is a int; expected an object with 'from' and 'value'"),
        (
            {"conversations": [{"from": "humans", "value": "x"}]},
            "conversations[0].from is 'humans'; expected one of human",
        ),
        ({"conversations": [{"from": "gpt", "text": "x"}]}, "conversations[0].value is null (there is 'from', 'text')"),
        (
            {"conversations": [{"from": "function_call", "value": "look()"}]},
            "conversations[0].value is 'look()'; expected a call as JSON",
        ),
        ({**SHAREGPT, "tools": "look"}, "the column 'tools' is a text but no JSON; expected a list of tools"),
        ({**SHAREGPT, "tools": {}}, "the column 'tools' is a dict; expected a list of tools"),
        ({**SHAREGPT, "system": 3}, "the column 'system' is a int, not a text: 3"),
        ({**ALPACA, "output": 3}, "the column 'output' is a int, not a text: 3"),
        ({**ALPACA, "history": [["a"]]}, "history[0] is ['a']; expected [instruction, output], two texts"),
        ({"prompt": [USER], "completion": [{"role": "assistant"}]}, "completion[0] (assistant) has no 'content'"),
        ({"messages": [USER], "text": "x"}, "can be read as text or as chat; choose with kind: text | chat"),
    ],
)
def test_malformed(tmp_path: Path, tokenizer: Path, record: dict[str, Any], message: str):
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: ") + ".*" + re.escape(message)):
        pack([Source(str(path))], tmp_path / "p", tokenizer=str(tokenizer), workers=1, quiet=True)


# The same names in YAML and on the command line.


def test_the_same_names_in_yaml_and_on_the_command_line(tmp_path: Path, tokenizer: Path, capsys: Any):
    pairs = [{"question": "hi ", "good": "ho", "bad": "no"}, {"question": "a ", "good": "b", "bad": "c"}]
    path = write_jsonl(tmp_path / "a.jsonl", pairs)
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    flags = [f"--column={name}={column}" for name, column in columns.items()]
    flags += ["--kind", "preference", "--use", "chosen", "--chat-template", "NAME", "--format", "jsonl"]
    flags[flags.index("NAME")] = str(save_file(tmp_path / "mine.jinja"))
    common = ["--tokenizer", tokenizer, "--workers", 1, "--json"]
    code, _, err = run(capsys, "data", "pack", path, *flags, *common, "--out", tmp_path / "packed")
    assert code == 0, err
    (tmp_path / "run.yaml").write_text(f"""
model: {{folder: {tokenizer}}}
data:
  context: 8
  packed: {tmp_path / "packed"}
  sources:
    - path: {path}
      columns: {json.dumps(columns)}
      kind: preference
      use: chosen
      chat_template: {tmp_path / "mine.jinja"}
      format: jsonl
train: {{steps: 1}}
""")
    code, out, err = run(capsys, "data", "pack", tmp_path / "run.yaml", "--workers", 1, "--json", "--context", 4)
    assert code == 0 and json.loads(out)["reused"] is True, err
    old = load(
        None, ["model.folder=x", "train.steps=1", "data.context=8", "data.sources=[{path: x, columns: {tokens: i}}]"]
    )
    assert sources_of(old.config.data.sources)[0].columns == {"input_ids": "i"}  # as it was called in older files


def save_file(path: Path) -> Path:
    path.write_text(MARKED)
    return path


# `data inspect` of files.


def test_inspect_of_files(tmp_path: Path, tokenizer: Path, capsys: Any):
    path = write_jsonl(tmp_path / "a.jsonl", [SHAREGPT, {"conversations": [*SHAREGPT["conversations"]] * 2}])
    code, out, err = run(capsys, "data", "inspect", path)
    assert code == 0, err
    assert f"{path}: jsonl, 1 file" in out and "kind sharegpt (conversations)" in out
    assert f"── {path}:1 ──\nuser: hi\nassistant: ⟦ho⟧\n── {path}:2 ──\n" in out and "⟦ ⟧ = supervised" in out
    code, out, _ = run(capsys, "data", "inspect", path, "--tokenizer", tokenizer, "--samples", 1)
    assert code == 0 and "chat template: the tokenizer's own" in out
    assert "<|start|>user\nhi<|end|>\n<|start|>assistant\n⟦ho<|end|>⟧\n" in out and ":2 ──" not in out
    pairs = write_jsonl(tmp_path / "b.jsonl", [{"chosen": [USER, ANSWER], "rejected": [USER, WORSE]}])
    code, out, _ = run(capsys, "data", "inspect", pairs)
    assert (
        code == 0
        and "kind preference (chosen, rejected)" in out
        and "both answers are packed, for objective: dpo" in out
    )
    assert "user: hi\nchosen: ⟦ho⟧\nrejected: ⟦no⟧" in out
    (tmp_path / "c.md").write_text("# a text")
    code, out, _ = run(capsys, "data", "inspect", tmp_path / "c.md", "--json")
    report = json.loads(out)
    assert (report["format"], report["kind"], report["sample"][0]["parts"][0]["text"]) == ("txt", "text", "# a text")
    write_jsonl(tmp_path / "bad.jsonl", [{"conversations": [{"from": "x"}]}])
    code, _, err = run(capsys, "data", "inspect", tmp_path / "bad.jsonl")
    assert code == 2 and "bad.jsonl:1: conversations[0].from is 'x'; expected one of" in err
    for flags, message in (
        (["--context", "8"], "are for packed folders"),
        (["--kind", "chats"], "kind 'chats' is unknown"),
    ):
        code, _, err = run(capsys, "data", "inspect", path, *flags)
        assert code == 2 and message in err
    assert (
        main(["data", "pack", str(path), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "p"), "--workers=1"])
        == 0
    )
    code, _, err = run(capsys, "data", "inspect", tmp_path / "p", "--kind", "chat")
    assert code == 2 and "--kind is for files, and" in err
