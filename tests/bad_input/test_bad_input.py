"""Bad input: what the command says, where, and the exit code it leaves with."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from bad_input_kit import HERE, KEYS, ROOT, lines_of, summary_of, tiny

from pipeflow.cli.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No module of one test's folder is there in the next; one thread."""
    import torch

    path, threads = list(sys.path), torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    yield
    sys.path[:] = path
    sys.modules.pop("points", None)
    torch.set_num_threads(threads)


class Told:
    """What one call of the command left: its exit code and both streams."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *argv: str) -> None:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(argv))
        self.code = int(left.value.code or 0)
        self.out, self.err = capfd.readouterr()

    def json(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """`run(file or text, *options)`: the command on it, into the run folder `r`."""

    def call(file: Path | str, *options: str) -> Told:
        if isinstance(file, str):
            path = tmp_path / "file.yaml"
            path.write_text(file)
            file = path
        return Told(capfd, "run", str(file), "--run-dir", str(tmp_path / "r"), *options)

    return call


# The file ------------------------------------------------------------------------------------------

HEAD = "pipeflow: 1\nname: x\nstages:\n"

FAULTS = {
    "broken yaml": (HEAD + "  a: {uses: data/jsonl\n  b: 3\n", "syntax", r":\d+:\d+ - "),
    "a tab": (HEAD + "\ta: 1\n", "syntax", r":4:1 - "),
    "not a mapping": ("- 1\n- 2\n", "syntax|wrong-type", r":1:1 - "),
    "empty": ("", "syntax|wrong-type", r":1:1 - "),
    "unknown stage": (
        HEAD + "  rows: {uses: data/jsonlx, with: {path: a}}\n",
        "unknown-stage",
        r":4:16 - stages\.rows\.uses: .*data/jsonlx",
    ),
    "unknown module": (
        HEAD + "  rows: {uses: 'nowhere:Stage'}\n",
        "unknown-stage",
        r":4:16 - stages\.rows\.uses: .*nowhere",
    ),
    "wrong type": (
        HEAD + "  rows:\n    uses: data/jsonl\n    with: {path: a, epochs: many}\n",
        "wrong-type",
        r":6:29 - stages\.rows\.with\.epochs: ",
    ),
    "out of bounds": (
        HEAD + "  rows:\n    uses: data/jsonl\n    with: {path: a, held_out: 1.5}\n",
        "wrong-type",
        r":6:31 - stages\.rows\.with\.held_out: ",
    ),
    "unknown key": (
        HEAD + "  rows: {uses: data/jsonl, wiht: {path: a}}\n",
        "unknown-key",
        r":4:28 - stages\.rows\.wiht: ",
    ),
    "duplicate key": (
        HEAD + "  rows: {uses: data/jsonl, uses: data/jsonl, with: {path: a}}\n",
        "duplicate-key",
        r":4:28 - stages\.rows\.uses: ",
    ),
    "unknown input": (
        HEAD
        + "  rows: {uses: data/jsonl, with: {path: a}}\n"
        + "  keep: {uses: data/write_jsonl, from: row, with: {path: b}}\n",
        "unknown-input",
        r":5:40 - stages\.keep\.from: .*row",
    ),
    "wrong version": ("pipeflow: 2\nname: x\nstages: {}\n", "version", r":1:11 - "),
    "missing variable": (
        HEAD + "  rows: {uses: data/jsonl, with: {path: '${env:NOT_SET_ANYWHERE}'}}\n",
        "missing-env",
        r":4:41 - stages\.rows\.with\.path: .*NOT_SET_ANYWHERE",
    ),
    "no such device": (
        HEAD + "  rows: {uses: data/phrases}\n  t: {uses: text/batch, from: rows, on: 'cuda:63'}\n",
        "no-such-device",
        r":5:\d+ - stages\.t\.on: .*cuda:63",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_file_is_told_by_its_place(name: str, run: Any, tmp_path: Path) -> None:
    text, codes, pattern = FAULTS[name]
    told = run(text, "--json")
    assert told.code == 1, told.err
    assert re.search(re.escape(str(tmp_path / "file.yaml")) + pattern, told.err), told.err
    assert re.search(rf"\[({codes})\]", told.err), told.err
    assert "nothing was started" in told.err
    assert "Traceback" not in told.err
    summary = told.json()
    assert set(KEYS) <= set(summary)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert any(re.fullmatch(codes, found["code"]) for found in summary["findings"])
    assert not (tmp_path / "r").exists()


def test_every_fault_is_told_at_once(run: Any) -> None:
    told = run(
        HEAD
        + "  a: {uses: nope}\n  b: {uses: data/jsonl, with: {path: 3}}\n"
        + "  c: {uses: data/jsonl, from: zz, with: {path: a}}\n"
    )
    assert told.code == 1
    assert {line for line in (4, 5, 6) if f"file.yaml:{line}:" in told.err} == {4, 5, 6}, told.err


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_missing_pipeline_file_is_a_usage_error(
    options: tuple[str, ...], capfd: Any, tmp_path: Path
) -> None:
    told = Told(capfd, "run", str(tmp_path / "none.yaml"), *options)
    assert told.code == 2
    assert "none.yaml" in told.err
    assert told.out == ""
    assert Told(capfd, "run", str(tmp_path)).code == 2


@pytest.mark.parametrize("argv", [("run",), ("run", "FILE", "steps"), ("run", "FILE", "--nope"), ("rnu",)])
def test_wrong_usage_is_2(argv: tuple[str, ...], capfd: Any, tmp_path: Path) -> None:
    file = tiny(tmp_path)
    told = Told(capfd, *(str(file) if word == "FILE" else word for word in argv))
    assert told.code == 2
    assert "Usage" in told.err
    assert told.out == ""


def test_an_override_that_fits_nothing_is_told(run: Any, tmp_path: Path) -> None:
    told = run(tiny(tmp_path), "stepz=3")
    assert told.code == 1
    assert "stepz" in told.err
    assert "steps" in told.err  # the near match


def test_a_run_folder_that_cannot_be_made(run: Any, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file\n")
    told = run(tiny(tmp_path), "--json")
    assert told.code == 1
    assert f"{tmp_path / 'r'}: cannot be written" in told.err
    assert "--run-dir" in told.err
    assert set(KEYS) <= set(told.json())
    assert (tmp_path / "r").read_text() == "a file\n"


# Data ----------------------------------------------------------------------------------------------

COPY = (
    "pipeflow: 1\nname: copy\nstages:\n"
    "  rows:\n    uses: data/jsonl\n    with: {path: data.jsonl, shuffle: false}\n"
    "    on_error: ON_ERROR\n"
    "  keep: {uses: data/write_jsonl, from: rows, with: {path: rows.jsonl}}\n"
)


def copy(on_error: str = "stop") -> str:
    return COPY.replace("ON_ERROR", on_error)


def test_missing_data_is_1_and_named(run: Any, tmp_path: Path) -> None:
    told = run(copy(), "--json")
    assert told.code == 1
    assert str(tmp_path / "data.jsonl") in told.err
    assert "no such file" in told.err
    assert "stage 'rows'" in told.err
    assert "Traceback" not in told.err
    summary = told.json()
    assert set(KEYS) <= set(summary)
    assert str(tmp_path / "data.jsonl") in summary["error"]
    assert summary_of(tmp_path / "r") == summary


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_empty_data_is_1_and_named(content: str, run: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    told = run(copy())
    assert told.code == 1
    assert f"{tmp_path / 'data.jsonl'}: has no rows" in told.err
    assert "Traceback" not in told.err


BAD_ROWS = {
    "no json": "nonsense",
    "cut short": '{"text": "a',
    "not an object": "[1, 2]",
    "wrong type": '{"text": 1}',
    "neither": '{"kind": "a"}',
    "both": '{"text": "a", "messages": []}',
    "unknown role": '{"messages": [{"role": "robot", "content": "a"}]}',
    "empty turn": '{"messages": [{"role": "user", "content": " "}]}',
    "not utf-8": '{"text": "\udcff"}',
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_malformed_row_is_named_by_its_line(name: str, run: Any, tmp_path: Path) -> None:
    text = '{"text": "a"}\n\n' + BAD_ROWS[name] + '\n{"text": "b"}\n'
    (tmp_path / "data.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    told = run(copy())
    assert told.code == 1
    assert f"{tmp_path / 'data.jsonl'}:3: " in told.err, told.err
    assert "Traceback" not in told.err
    assert not (tmp_path / "r" / "rows.jsonl").exists()

    told = run(copy("{skip: 1}"), "--json")
    assert told.code == 0, told.err
    assert told.json()["skipped"] == {"rows": 1}
    assert [row["text"] for row in lines_of(tmp_path / "r" / "rows.jsonl")] == ["a", "b"]
    (letter,) = lines_of(tmp_path / "r" / "dead_letter.jsonl")
    assert letter["stage"] == "rows"
    assert f"{tmp_path / 'data.jsonl'}:3" in letter["error"]
    assert f"{tmp_path / 'data.jsonl'}:3" in letter["item"]


def test_a_file_that_waits_for_submits_is_no_file_to_run(run: Any) -> None:
    told = run(
        "pipeflow: 1\nname: x\nstages:\n  requests: {uses: input}\n  out: {uses: output, from: requests}\n"
    )
    assert told.code == 1
    assert "'requests' takes its items from a program" in told.err


def test_above_the_budget_it_is_1(run: Any, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\nx\ny\nz\n{"text": "b"}\n')
    told = run(copy("{skip: 2}"), "--json")
    assert told.code == 1
    assert "data.jsonl:4: " in told.err
    assert "budget of 2" in told.err
    assert len(lines_of(tmp_path / "r" / "dead_letter.jsonl")) == 2
    summary = summary_of(tmp_path / "r")
    assert (summary["status"], summary["skipped"]) == ("failed", {"rows": 2})
    assert not (tmp_path / "r" / "rows.jsonl").exists()


# Text models ---------------------------------------------------------------------------------------


def _stages_conftest() -> Any:
    spec = importlib.util.spec_from_file_location(
        "stages_conftest", ROOT / "tests" / "stages" / "conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and a tokenizer of bytes, in transformers' layout."""
    conftest, folder = _stages_conftest(), tmp_path_factory.mktemp("model")
    conftest.make_model().save_pretrained(folder)
    conftest.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def templateless(model: Path, tmp_path: Path) -> Path:
    import shutil

    folder = tmp_path / "templateless"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


TEXT = """\
pipeflow: 1
name: text
resources:
  model: {{uses: hf/causal_lm, on: cpu, with: {{model: "{model}"}}}}
  held: {{uses: "{held}"{options}}}
stages:
  rows: {{uses: data/jsonl, with: {{path: data.jsonl, shuffle: false}}, on_error: {on_error}}}
  chat:
    uses: text/chat
    from: rows
    reads: model
    with: {{max_length: 64, over_long: {over_long}}}
    on_error: {on_error}
  batches: {{uses: text/batch, from: chat, with: {{max_length: 64}}}}
  count: {{uses: "points:Count", from: batches, reads: held}}
"""


def text(folder: Path, model: Path, rows: list[str], **changes: str) -> Path:
    """A file from rows to batches, and the rows beside it."""
    given = {"held": "points:Nothing", "options": "", "on_error": "stop", "over_long": "drop"} | changes
    (folder / "data.jsonl").write_text("".join(row + "\n" for row in rows))
    (folder / "points.py").write_text((HERE / "beside" / "points.py").read_text())
    file = folder / "text.yaml"
    file.write_text(TEXT.format(model=model, **given))
    return file


def turns(*contents: str) -> str:
    roles = ["user", "assistant"]
    return json.dumps({"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]})


GOOD = [turns("hi", "ho"), turns("a", "b")]


def test_a_good_text_file_passes(run: Any, tmp_path: Path, model: Path) -> None:
    told = run(text(tmp_path, model, GOOD), "--json")
    assert told.code == 0, told.err
    assert told.json()["rows_seen"] == 2


@pytest.mark.parametrize(("policy", "code"), [("error", 1), ("drop", 0), ("truncate", 0)])
def test_an_over_long_conversation(policy: str, code: int, run: Any, tmp_path: Path, model: Path) -> None:
    rows = [GOOD[0], turns("q", "long " * 40), GOOD[1]]
    told = run(text(tmp_path, model, rows, over_long=policy), "--json")
    assert told.code == code, told.err
    if policy == "error":
        assert f"{tmp_path / 'data.jsonl'}:2: " in told.err
        assert "more than max_length 64" in told.err
        assert "Traceback" not in told.err
    else:
        assert told.json()["rows_seen"] == (2 if policy == "drop" else 3)
    if policy == "drop":
        dropped = [m for m in lines_of(tmp_path / "r" / "metrics.jsonl") if m.get("dropped_over_long")]
        assert [m["source"] for m in dropped] == [f"{tmp_path / 'data.jsonl'}:2"]


def test_an_over_long_row_that_reaches_a_batch_is_named(run: Any, tmp_path: Path, model: Path) -> None:
    file = text(tmp_path, model, [GOOD[0], turns("q", "long " * 6), GOOD[1]])
    file.write_text(
        file.read_text().replace("from: chat, with: {max_length: 64}", "from: chat, with: {max_length: 48}")
    )
    told = run(file)
    assert told.code == 1
    assert f"{tmp_path / 'data.jsonl'}:2: " in told.err
    assert "more than max_length 48" in told.err


def test_rows_without_a_supervised_token_are_named(run: Any, tmp_path: Path, model: Path) -> None:
    rows = [GOOD[0], turns("only a question"), turns("another one"), GOOD[1]]
    told = run(text(tmp_path, model, rows))
    assert told.code == 1
    assert f"{tmp_path / 'data.jsonl'}:2: no token is supervised" in told.err
    told = run(text(tmp_path, model, rows, on_error="{skip: 2}"), "--json")
    assert told.code == 0, told.err
    assert told.json()["rows_seen"] == 2
    letters = lines_of(tmp_path / "r" / "dead_letter.jsonl")
    assert [re.findall(r"data\.jsonl:(\d)", letter["error"]) for letter in letters] == [["2"], ["3"]]


def test_an_answer_beyond_the_cut_supervises_nothing(run: Any, tmp_path: Path, model: Path) -> None:
    told = run(text(tmp_path, model, [turns("q " * 60, "a")], over_long="truncate"))
    assert told.code == 1
    assert "data.jsonl:1: no token is supervised" in told.err


def test_a_model_without_a_chat_template(run: Any, tmp_path: Path, templateless: Path) -> None:
    told = run(text(tmp_path, templateless, GOOD))
    assert told.code == 1
    assert "has no chat template" in told.err
    assert str(templateless) in told.err
    assert "data.jsonl:1" in told.err
    assert "instruction-tuned model" in told.err  # the remedy
    assert "Traceback" not in told.err
    plain = text(tmp_path, templateless, ['{"text": "plain text"}'])
    assert run(plain).code == 0


def test_a_model_that_is_not_there(run: Any, tmp_path: Path) -> None:
    told = run(text(tmp_path, tmp_path / "no_model", GOOD))
    assert told.code == 1
    assert "no_model" in told.err
    assert "Traceback" not in told.err


HELD = ", reads: model, with: {path: data.jsonl, split: all, max_length: 64, skip: SKIP}"


@pytest.mark.parametrize("skip", [0, 1])
def test_a_malformed_held_out_row(skip: int, run: Any, tmp_path: Path, model: Path) -> None:
    """The rows of evaluation come from the same file, so they have a budget too."""
    rows = [GOOD[0], "nonsense", GOOD[1]]
    options = HELD.replace("SKIP", str(skip))
    told = run(text(tmp_path, model, rows, held="text/rows", options=options, on_error="{skip: 1}"))
    assert told.code == 1 - skip, told.err
    if skip:
        (skipped,) = [m for m in lines_of(tmp_path / "r" / "metrics.jsonl") if m["stage"] == "held"]
        assert skipped["source"] == f"{tmp_path / 'data.jsonl'}:2"
    else:
        assert f"{tmp_path / 'data.jsonl'}:2: " in told.err
        assert "Traceback" not in told.err


def test_held_out_rows_by_a_model_without_a_template(run: Any, tmp_path: Path, templateless: Path) -> None:
    told = run(text(tmp_path, templateless, GOOD, held="text/rows", options=HELD.replace("SKIP", "0")))
    assert told.code == 1
    assert "resource 'held': " in told.err
    assert "data.jsonl:1: model" in told.err
    assert "has no chat template" in told.err


def test_no_held_out_row_is_left(run: Any, tmp_path: Path, model: Path) -> None:
    options = HELD.replace("max_length: 64", "max_length: 2").replace("SKIP", "0")
    told = run(text(tmp_path, model, GOOD, held="text/rows", options=options))
    assert told.code == 1
    assert f"{tmp_path / 'data.jsonl'}: no row" in told.err


def test_a_mask_token_out_of_range(run: Any, tmp_path: Path) -> None:
    told = run(tiny(tmp_path), "mask=21")
    assert told.code == 1
    assert "mask_token_id 21 is out of range" in told.err
    assert "21 token ids" in told.err
    assert "Traceback" not in told.err


def test_blocks_filled_with_another_mask_token(run: Any, tmp_path: Path) -> None:
    """It would train, and on the wrong token."""
    told = run(tiny(tmp_path), "mask=19")
    assert told.code == 1
    assert "filled with token 20" in told.err
    assert "mask_token_id is 19" in told.err
    assert not (tmp_path / "r" / "drafter").exists()


def test_taps_that_the_target_does_not_have(run: Any, tmp_path: Path) -> None:
    file = tiny(tmp_path)
    file.write_text(file.read_text().replace("taps: 1", "taps: 9"))
    told = run(file)
    assert told.code == 1
    assert "9 taps do not fit a target of 4 layers" in told.err
    assert "Traceback" not in told.err
