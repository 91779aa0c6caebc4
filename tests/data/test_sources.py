import json

import pytest
from etils import epath
from helpers.paths import GOLDEN, shared_data

from mars_jax.data.config import DataConfig
from mars_jax.data.sources import as_messages, held_out_chats, read_chats, training_chats
from mars_jax.errors import UserError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(path, split="train", **config):
    return list(read_chats(str(path), split, DataConfig(**config)))


def test_jsonl_of_messages():
    chats = read(GOLDEN / "synth" / "train.jsonl")
    assert len(chats) == 2400
    assert chats[1] == [
        {"role": "user", "content": "Spell orange."},
        {"role": "assistant", "content": "o-r-a-n-g-e spells orange."},
    ]


def test_lines_end_at_line_feeds_only(tmp_path):
    text = "one\u2028two\u2029three\x85four\x0bfive\x0csix"
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": text, "answer": "b"}, {"prompt": "c", "answer": text}]
    path.write_bytes(b"\r\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"\n\n")
    assert [[m["content"] for m in chat] for chat in read(path)] == [[text, "b"], ["c", text]]


def test_gsm8k_columns():
    chats = read(shared_data() / "gsm8k" / "train.jsonl")
    assert len(chats) == 7473
    assert "\u2028" in "".join(m["content"] for m in chats[2381])
    assert all([m["role"] for m in chat] == ["user", "assistant"] for chat in chats)


def test_named_columns():
    row = {"ask": "a", "reply": "b", "messages": "unused"}
    cfg = DataConfig(prompt_column="ask", answer_column="reply")
    assert as_messages(row, "here", cfg) == CHAT


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "x.jsonl, line 2: not a JSON object"),
        ("[1]", "x.jsonl, line 2: expected an object with named columns, found list"),
        ('{"text": "a"}', "x.jsonl, line 2: no `messages` and no prompt/answer or question/answer, only text"),
        ('{"messages": []}', "x.jsonl, line 2: messages must be a list"),
        ('{"messages": [{"content": "a"}]}', "x.jsonl, line 2: message 0 must have a role and a content"),
    ],
)
def test_errors_name_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(UserError) as caught:
        read(path)
    assert complaint in str(caught.value)


def test_broken_utf8_names_its_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "b"}\n')
    with pytest.raises(UserError, match="line 1: not a JSON object"):
        read(path)


def test_missing_file_is_named():
    with pytest.raises(UserError, match=r"'/nowhere/x\.jsonl': no such file"):
        read("/nowhere/x.jsonl")


def test_bucket_paths_are_opened_as_they_are(tmp_path, monkeypatch):
    """gs://… goes to etils, which reads buckets; here a folder plays the bucket."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    asked = []

    def path(text):
        asked.append(text)
        return tmp_path / text.removeprefix("gs://bucket/")

    monkeypatch.setattr(epath, "Path", path)
    assert read("gs://bucket/chats.jsonl") == [CHAT]
    assert set(asked) == {"gs://bucket/chats.jsonl"}


@pytest.fixture
def dataset():
    datasets = pytest.importorskip("datasets", reason="PACKAGE ABSENT: datasets, so its sources were not tested")
    return datasets.Dataset.from_list([{"messages": CHAT}, {"messages": CHAT[:1]}])


def test_saved_hugging_face_data_set(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == [CHAT, CHAT[:1]]


def test_saved_splits(tmp_path, dataset):
    import datasets

    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", "test") == [CHAT[:1]]
    with pytest.raises(UserError, match="no split 'validation', only train, test"):
        read(tmp_path / "saved", "validation")


def test_folder_of_parquet_files(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "named"
    folder.mkdir()
    dataset.to_parquet(folder / "train.parquet")
    assert read(folder) == [CHAT, CHAT[:1]]
    assert read(f"hf:{folder}") == [CHAT, CHAT[:1]]


def test_hub_names_go_to_datasets(monkeypatch):
    import datasets

    calls = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or [{"messages": CHAT}]
    )
    assert read("owner/name", "validation", subset="main") == [CHAT]
    assert read("hf:name") == [CHAT]
    assert calls == [(("owner/name", "main"), {"split": "validation"}), (("name", None), {"split": "train"})]


def test_hub_errors_name_the_data_set(monkeypatch):
    with pytest.raises(UserError, match="data set 'owner/absent'"):  # tests are offline
        read("owner/absent")


def test_tfds_text_is_decoded(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets", reason="PACKAGE ABSENT: tensorflow-datasets was not tested")
    rows = [
        {"question": b"caf\xc3\xa9?", "answer": b"b"},
        {"messages": {"role": [b"user", b"assistant"], "content": [b"a", b"b"]}},
    ]
    monkeypatch.setattr(tfds, "data_source", lambda name, split: rows if (name, split) == ("x/y", "test") else None)
    assert read("tfds:x", "test", subset="y") == [
        [{"role": "user", "content": "café?"}, {"role": "assistant", "content": "b"}],
        CHAT,
    ]


def test_synthetic_is_the_default():
    cfg = DataConfig(max_rows=30, eval_rows=7)
    assert len(training_chats(cfg)) == 30
    assert len(held_out_chats(cfg)) == 7


def test_held_out_chats_are_taken_out_of_the_training_chats(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "answer": "b"}) + "\n" for i in range(40)))
    cfg = DataConfig(path=str(path), eval_rows=10, max_rows=30)
    train = [chat[0]["content"] for chat in training_chats(cfg)]
    held_out = [chat[0]["content"] for chat in held_out_chats(cfg)]
    assert len(train) == 20 and len(held_out) == 10
    assert sorted(train + held_out, key=int) == [str(i) for i in range(30)]
    with pytest.raises(UserError, match="eval_rows=20 is more than half of the 30 chats"):
        training_chats(DataConfig(path=str(path), eval_rows=20, max_rows=30))


def test_own_file_of_held_out_chats(tmp_path):
    for name, count in (("train", 5), ("test", 9)):
        rows = [json.dumps({"prompt": f"{name}{i}", "answer": "b"}) + "\n" for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    cfg = DataConfig(path=str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "test.jsonl"), eval_rows=4)
    assert len(training_chats(cfg)) == 5
    assert [chat[0]["content"] for chat in held_out_chats(cfg)] == ["test0", "test1", "test2", "test3"]


@pytest.mark.parametrize(
    "values", [{"prompt_column": "a"}, {"max_rows": 0}, {"eval_rows": -1}], ids=lambda values: next(iter(values))
)
def test_config_is_checked(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        DataConfig(**values)
