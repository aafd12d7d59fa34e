"""`layerplan data prepare`: what it writes, what it refuses, and that damaged datasets are found before training."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from layerplan.integration.training.indexed import DatasetError, check_data, check_dataset, tokenizer_path
from layerplan.integration.training.metrics import Metrics, read_metrics
from layerplan.integration.training.tokenizer import TokenizerError, byte_tokenizer, load_tokenizer, train_bpe
from layerplan.recipes import load_recipe

pytest.importorskip("megatron.core")

from layerplan.integration.training.data_prepare import PrepareError, prepare, prepare_command

TEXT = "The quick brown fox jumps over the lazy dog.\n\tVoix ambiguë d'un cœur; naïve 日本語 🦊 <|eod|> end.\n"
SUFFIXES = ("bin", "idx", "tokenizer.json")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text(TEXT * 20)
    (folder / "a.py").write_text("def f(x):\n    return x + 1\n" * 30)
    (folder / "inner" / "c.jsonl").write_text("".join(json.dumps({"text": f"line {i} {TEXT}"}) + "\n" for i in range(5)))
    (folder / "empty.txt").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def contents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))  # what it returns are views of its map: they must not outlive it
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_documents_come_back_as_they_went_in_each_with_its_end(corpus, tmp_path, kind):
    info, tokenizer, skipped = prepare([corpus], tmp_path / "out", tokenizer=kind, vocab_size=300)
    documents = contents(tmp_path / "out")
    assert info.documents == len(documents) == 7 and info.tokens == sum(map(len, documents))
    assert skipped.empty == 1 and skipped.files == []
    assert all(d[-1] == tokenizer.eod and tokenizer.eod not in d[:-1] for d in documents)
    assert max(map(max, documents)) < tokenizer.vocab_size <= 300
    again = load_tokenizer(tokenizer_path(tmp_path / "out"))
    assert again.decode(documents[0]) == (corpus / "a.py").read_text()
    assert [again.decode(d) for d in documents[2:]] == [f"line {i} {TEXT}" for i in range(5)]
    assert (again.vocab_size, again.eod, again.pad) == (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_same_inputs_give_the_same_bytes(corpus, tmp_path, kind):
    for name in ("one", "two"):
        prepare([corpus], tmp_path / name, tokenizer=kind, vocab_size=400)
    for suffix in SUFFIXES:
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_bpe_tokenizes_shorter_than_bytes_and_loses_nothing():
    tokenizer = train_bpe([TEXT * 10], 400)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) < len(byte_tokenizer().encode(TEXT)) / 2
    strange = "\x00\x7f\ud7ff ̈ \r\n"
    assert tokenizer.decode(tokenizer.encode(strange)) == strange


def test_special_token_text_in_a_document_is_text():
    for tokenizer in (train_bpe([TEXT], 300), byte_tokenizer()):
        ids = tokenizer.encode("a<|eod|>b<|pad|>")
        assert tokenizer.eod not in ids and tokenizer.pad not in ids
        assert tokenizer.decode([*ids, tokenizer.eod, tokenizer.pad]) == "a<|eod|>b<|pad|>"


def test_empty_input_is_refused_by_name_and_leaves_nothing(tmp_path):
    (tmp_path / "void.txt").write_text("\n \n")
    with pytest.raises(PrepareError, match=r"void\.txt.*holds no text"):
        prepare([tmp_path / "void.txt"], tmp_path / "out", tokenizer="byte")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["void.txt"]


def test_inputs_that_are_not_there_or_hold_no_text_files_come_in_one_error(tmp_path):
    (tmp_path / "bare").mkdir()
    with pytest.raises(PrepareError) as caught:
        prepare([tmp_path / "missing.txt", tmp_path / "bare"], tmp_path / "out")
    assert "missing.txt" in str(caught.value) and "bare" in str(caught.value)
    with pytest.raises(PrepareError, match="none given"):
        prepare([], tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "said"), [("{broken", "is not JSON"), ('{"body": "x"}', "text under 'text', it has body"), ('{"text": 3}', "text under"), ("[1]", "it has list")]
)
def test_a_bad_json_line_is_named_by_file_and_number(tmp_path, line, said):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(PrepareError) as caught:
        prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer="byte")
    assert "x.jsonl, line 3" in str(caught.value) and said in str(caught.value)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


def test_another_json_key_is_read(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "hello", "text": "no"}\n')
    prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer="byte", jsonl_key="body")
    assert byte_tokenizer().decode(contents(tmp_path / "out")[0]) == "hello"


def test_a_file_that_is_not_text_is_refused_when_named_and_counted_in_a_folder(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "bad.txt").write_bytes(b"abc\xff\xfe")
    (tmp_path / "d" / "good.txt").write_text("good")
    with pytest.raises(PrepareError, match=r"bad\.txt: is not UTF-8 text.*byte 3"):
        prepare([tmp_path / "d" / "bad.txt"], tmp_path / "out", tokenizer="byte")
    _, _, skipped = prepare([tmp_path / "d"], tmp_path / "out", tokenizer="byte")
    assert [s.rpartition("/")[2] for s in skipped.files] == ["bad.txt"]


def test_a_prefix_inside_an_input_folder_is_never_read_back(corpus, tmp_path):
    """The same inputs give the same bytes, however often; with a sample index, another dataset and a killed run's rest beside them."""
    first, _, skipped = prepare([corpus], corpus / "set", tokenizer="byte")
    assert skipped.prepared == 0
    bytes_of = {suffix: (corpus / f"set.{suffix}").read_bytes() for suffix in SUFFIXES}
    (corpus / "set.cache" / "1-2").mkdir(parents=True)
    (corpus / "set.cache" / "1-2" / "description.txt").write_text("index")
    (corpus / ".set.k1lled.preparing").mkdir()
    (corpus / ".set.k1lled.preparing" / "data.tokenizer.json").write_text("{}")
    prepare([corpus / "b.txt"], corpus / "inner" / "other", tokenizer="byte")
    again, _, skipped = prepare([corpus], corpus / "set", tokenizer="byte")
    assert again == first and skipped.prepared == 4
    assert {suffix: (corpus / f"set.{suffix}").read_bytes() for suffix in SUFFIXES} == bytes_of
    (corpus / "set.idx").unlink()  # a run that was killed between its renames: the prefix is still the one to be written
    assert prepare([corpus], corpus / "inner" / ".." / "set", tokenizer="byte")[0] == first
    for name in ("set.tokenizer.json", "set.bin", "inner/other.tokenizer.json"):
        with pytest.raises(PrepareError, match=r"belongs to a prepared dataset; name the text"):
            prepare([corpus / name], corpus / "set", tokenizer="byte")
    prepare([corpus], tmp_path / "elsewhere", tokenizer="byte")
    assert (tmp_path / "elsewhere.bin").read_bytes() == bytes_of["bin"]


def test_a_file_that_only_looks_like_a_tokenizer_is_text(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.tokenizer.json").write_text('{"no": "dataset"}')
    (tmp_path / "d" / "b.cache").mkdir()
    (tmp_path / "d" / "b.cache" / "c.txt").write_text("text")
    assert prepare([tmp_path / "d"], tmp_path / "out", tokenizer="byte")[0].documents == 2


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="vocab_size = 100: must be at least 258"):
        train_bpe([TEXT], 100)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("change", ["truncated", "longer", "missing", "emptied"])
def test_a_damaged_dataset_is_refused_and_the_file_named(corpus, tmp_path, suffix, change):
    prepare([corpus], tmp_path / "out", tokenizer="byte")
    path = tmp_path / f"out.{suffix}"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-3], "longer": data + b"\0\0", "emptied": b""}[change])
    with pytest.raises(DatasetError) as caught:
        check_dataset(tmp_path / "out")
    assert f"out.{suffix}" in str(caught.value)
    recipe = load_recipe("gpt_tiny", [f"data.prefix={tmp_path / 'out'}"])
    assert [p.field for p in check_data(recipe)[0]] == ["data.prefix"]


HEAD, SEQUENCES = 34, 7  # bytes of an index's header; sequences of the corpus


@pytest.mark.parametrize(
    ("place", "form", "values", "said"),
    [
        (HEAD, "<2i", (-5, 10), "length of sequence 0 is -5: must be at least 0"),
        (HEAD + 4 * SEQUENCES + 8, "<q", (10**12,), "pointer of sequence 1 is 1000000000000: must be where the sequences before it end"),
        (HEAD + 12 * SEQUENCES, "<q", (1,), "table of documents is from 1 to 7: must go from 0 to the 7 sequences"),
        (HEAD + 12 * SEQUENCES + 16, "<q", (0,), "start of document 2 is 0: must not be before"),
        (HEAD + 12 * SEQUENCES + 8 * SEQUENCES, "<q", (10**6,), "from 0 to 1000000"),
        (17, "<B", (7,), "token code 7"),
    ],
)  # fmt: skip
def test_a_damaged_index_of_the_right_size_is_refused_by_its_entry(corpus, tmp_path, place, form, values, said):
    prepare([corpus], tmp_path / "out", tokenizer="byte")
    data = bytearray((tmp_path / "out.idx").read_bytes())
    struct.pack_into(form, data, place, *values)
    (tmp_path / "out.idx").write_bytes(data)
    with pytest.raises(DatasetError) as caught:
        check_dataset(tmp_path / "out")
    assert "out.idx" in str(caught.value) and said in str(caught.value)


def test_tokens_outside_the_vocabulary_are_a_problem_of_the_data(corpus, tmp_path, monkeypatch):
    prepare([corpus], tmp_path / "out", tokenizer="byte")
    recipe = load_recipe("gpt_tiny", [f"data.prefix={tmp_path / 'out'}"])
    assert check_data(recipe)[0] == []
    with (tmp_path / "out.bin").open("r+b") as f:
        f.write(struct.pack("<H", 258))
    (problem,) = check_data(recipe)[0]
    assert problem.field == "data.prefix" and "out.bin: holds the token id 258" in problem.rule and "vocab_size = 258" in problem.rule
    monkeypatch.setattr("layerplan.integration.training.indexed._SCANNED_BYTES", 10)
    assert check_data(recipe)[0] == []  # large data is looked at batch by batch


def test_a_dataset_that_is_not_there_is_one_problem_with_the_command_that_makes_it(tmp_path):
    (problem,) = check_data(load_recipe("gpt_tiny", [f"data.prefix={tmp_path / 'mine'}"]))[0]
    assert (problem.field, problem.rule) == ("data.prefix", f"{tmp_path / 'mine.idx'}: no such file")
    assert problem.remedy == f"prepare the data with: layerplan data prepare INPUT... --output-prefix {tmp_path / 'mine'}"


def test_an_index_of_no_documents_is_refused(tmp_path):
    (tmp_path / "out.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 1) + bytes(8))
    (tmp_path / "out.bin").write_bytes(b"")
    with pytest.raises(DatasetError, match="holds 0 sequences"):
        check_dataset(tmp_path / "out")


def test_a_recipe_that_does_not_fit_its_data_names_every_field(tmp_path):
    (tmp_path / "t.txt").write_text("short")
    prepare([tmp_path / "t.txt"], tmp_path / "out", tokenizer="byte")
    problems, _ = check_data(load_recipe("gpt_tiny", [f"data.prefix={tmp_path / 'out'}", "model.vocab_size=128"]))
    assert {p.field for p in problems} == {"model.seq_length", "model.vocab_size"}
    problems, _ = check_data(load_recipe("gpt_tiny"))
    assert problems[0].field == "data.prefix" and "layerplan data prepare" in problems[0].remedy


@pytest.mark.parametrize(
    "change", [lambda d: d | {"format": 2}, lambda d: d | {"kind": "words"}, lambda d: d | {"eod": 10**6}, lambda d: d | {"model": {}}, lambda d: []]
)
def test_a_damaged_tokenizer_file_is_refused_by_name(tmp_path, change):
    data = json.loads(train_bpe([TEXT], 300).to_json())
    (tmp_path / "t.json").write_text(json.dumps(change(data)))
    with pytest.raises(TokenizerError, match=r"t\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_the_command_says_what_it_wrote_and_refuses_with_status_two(corpus, tmp_path, capsys):
    assert prepare_command([corpus], tmp_path / "out", "byte", 0, "text") == 0
    said = capsys.readouterr().out
    assert "7 documents" in said and "left out: 1 documents without text" in said
    assert prepare_command([tmp_path / "missing"], tmp_path / "other", "byte", 0, "text") == 2
    assert "missing" in capsys.readouterr().err


def test_metrics_of_steps_that_are_run_again_are_replaced_and_a_cut_last_line_is_passed_over(tmp_path):
    first = Metrics(tmp_path, 0)
    for step in range(1, 6):
        first.write({"step": step, "loss": 1.0})
    first.close()
    with first.path.open("a") as f:
        f.write('{"step": 6, "lo')
    second = Metrics(tmp_path, 3)
    second.write({"step": 4, "loss": 2.0})
    second.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(second.path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    Metrics(tmp_path, 0).close()
    assert len(read_metrics(tmp_path / "metrics.1.jsonl")) == 4 and read_metrics(second.path) == []


def test_the_validation_loss_is_drawn_beside_the_loss(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from layerplan.integration.training.plots import plot_loss, write_tensorboard

    rows = [{"step": s, "loss": 5.0 - s / 10} | ({"validation_loss": 5.5 - s / 10} if s % 4 == 0 else {}) for s in range(1, 13)]
    for name, keep in (("with", True), ("without", False)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({k: v for k, v in r.items() if keep or k != "validation_loss"}) + "\n" for r in rows))  # fmt: skip
        assert plot_loss(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
    events = EventAccumulator(str(write_tensorboard(tmp_path / "with.jsonl", tmp_path / "events"))).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("validation_loss")] == [(4, 5.1), (8, 4.7), (12, 4.3)]
    assert len(events.Scalars("loss")) == 12


def test_curves_of_several_runs_are_drawn_and_compared_with_the_first(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    import curves

    for name, shift, speed in (("ours", 0.0, 200), ("theirs", 0.25, 100), ("empty", 0.0, 1)):
        rows = [{"step": s, "loss": 5.0 - s / 10 + shift, "tokens_per_s": speed, "memory_bytes": 2**30} for s in range(1, 11)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (rows if name != "empty" else ())))
    ours, theirs = (str(tmp_path / name) for name in ("ours", "theirs"))
    for runs, png in (([ours, theirs], "both.png"), ([ours], "one.png")):
        monkeypatch.setattr("sys.argv", ["curves.py", *runs, "--out", str(tmp_path / png), "--record", str(tmp_path / "record.json")])
        curves.main()
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[: len(runs)]]
        assert json.loads((tmp_path / "record.json").read_text())["rows"] == rows and (tmp_path / png).read_bytes().startswith(b"\x89PNG")
        if len(runs) > 1:
            assert [r["run"] for r in rows] == ["ours", "theirs"] and rows[1]["speed_ratio"] == 0.5
            assert rows[1]["largest_distance"] == pytest.approx(0.25) and "largest_distance" not in rows[0]
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "one.png").read_bytes()
    monkeypatch.setattr("sys.argv", ["curves.py", ours, str(tmp_path / "empty"), "--out", str(tmp_path / "x.png")])
    with pytest.raises(SystemExit, match=r"empty: must be a folder with metrics\.jsonl"):
        curves.main()


def test_a_broken_line_in_the_middle_of_metrics_is_an_error_with_its_number(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\nxx\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path / "m.jsonl")
