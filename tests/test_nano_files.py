"""What ships in `data/` is what the code writes, and no evaluation question is in it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from dspark.errors import UserError
from dspark.nano.generate import row
from dspark.nano.overlap import THRESHOLD, EvaluationIndex, find_hits, read_questions, trigrams
from dspark.nano.prompts import main, more_prompts, prompt_files, write_prompts

DATA = Path(__file__).resolve().parent.parent / "data"


def test_trigrams_ignore_case_punctuation_and_the_value_of_numbers() -> None:
    assert trigrams("Buy 3 pens, now!") == trigrams("buy 12 PENS now")
    assert trigrams("two words") == set()


def test_a_copied_question_with_other_numbers_is_found() -> None:
    made = next(r for i in range(99) if "####" in (r := row(0, i, "train")).messages[1]["content"])
    copied = re.sub(r"\d+", "77", made.messages[0]["content"])
    hits, largest = find_hits(EvaluationIndex(["What is love?", copied]), rows=1)
    assert largest == 1.0
    assert [hit.evaluation for hit in hits] == [copied]


def test_half_a_question_is_a_hit_and_a_third_is_not() -> None:
    index = EvaluationIndex(["a b c d e f g h"])
    assert THRESHOLD < index.closest("a b c d e x y z")[0] == 3 / 6
    assert THRESHOLD > index.closest("a b c d x y z w")[0] == 2 / 6
    assert index.closest("q r s t") == (0.0, "")


def test_evaluation_files_in_every_layout(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    messages = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "x"}]
    records = [{"turns": ["a", "b"]}, {"messages": messages}, {"prompt": "d"}]
    path.write_text("\n\n".join(map(json.dumps, records)), "utf-8")
    assert list(read_questions(path)) == ["a", "b", "c", "d"]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n', "utf-8")
    with pytest.raises(UserError, match=r"eval\.jsonl:2: expected a field"):
        list(read_questions(path))
    path.write_text("{\n", "utf-8")
    with pytest.raises(UserError, match=r"eval\.jsonl:1: expected one JSON object"):
        list(read_questions(path))


def test_shipped_prompts_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_prompts(tmp_path, prompt_files())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (DATA / "prompts" / name).read_bytes(), name


def test_prompt_files_are_disjoint_and_sized() -> None:
    files = prompt_files()
    questions = {name: {r["messages"][0]["content"] for r in rs} for name, rs in files.items()}
    assert {name: len(q) for name, q in questions.items()} == {
        "train.jsonl": 2000,
        "validation.jsonl": 200,
        "test.jsonl": 350,
    }
    assert len(set().union(*questions.values())) == 2550
    for records in files.values():
        for record in records:
            assert [m["role"] for m in record["messages"]] == ["user"]
            assert set(record) <= {"id", "family", "messages", "answer"}
    assert sum("answer" in r and r["answer"].isdigit() for r in files["test.jsonl"]) >= 300


def test_more_prompts_are_training_prompts_that_no_shipped_file_holds() -> None:
    more = more_prompts(300)
    questions = {r["messages"][0]["content"] for r in more}
    shipped = {r["messages"][0]["content"] for rs in prompt_files().values() for r in rs}
    assert len(more) == len(questions) == 300
    assert not questions & shipped
    assert all(str(r["id"]).startswith("train-2-") for r in more)
    assert more_prompts(20) == more[:20]
    assert more_prompts(20, seed=3) != more[:20]


def test_readme_names_every_shipped_file_with_its_hash() -> None:
    text = (DATA / "README.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| `([^`]+)` \| [\d,]+ \| `([0-9a-f]{64})` \|", text, re.M))
    files = [DATA / "k3-nano" / n for n in ("tokenizer.json", "tokenizer_config.json")]
    files += [DATA / "k3-nano" / "chat_template.jinja", *(DATA / "prompts").iterdir()]
    for path in files:
        name = path.relative_to(DATA).as_posix()
        assert listed[name] == hashlib.sha256(path.read_bytes()).hexdigest(), name


def test_data_stays_small() -> None:
    sizes = {p: p.stat().st_size for p in DATA.rglob("*") if p.is_file()}
    assert sum(sizes.values()) <= 12 * 2**20
    assert sum(size for p, size in sizes.items() if p.parent.name == "prompts") < 2**20


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("here", "utf-8")
    assert main(["--out", str(taken), "--more", "1"]) == 2
    told = capsys.readouterr().err
    assert told == f"error: --out {taken}: cannot be written (File exists)\n"
