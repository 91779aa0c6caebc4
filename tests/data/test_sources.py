import importlib
import json

import pytest
from etils import epath
from helpers.paths import GOLDEN, shared_data

from mars_jax.data import sources
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
        ('{"messages": [], "tools": [{}]}', "x.jsonl, line 2: tool descriptions are not rendered"),
        ('{"messages": []}', "x.jsonl, line 2: messages must be a list"),
        ('{"messages": {"role": 5, "content": 7}}', "x.jsonl, line 2: messages must be a list"),
        ("[" * 100_000, "x.jsonl, line 2: not a JSON object"),
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


def test_a_folder_that_datasets_cannot_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{")
    with pytest.raises(UserError, match=f"data set '{tmp_path}/data'"):
        read(tmp_path / "data")


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


TFDS_BUILDER = """
import tensorflow_datasets as tfds


class TinyChats(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        messages = tfds.features.Sequence({"role": text, "content": text})
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"question": text, "answer": text, "turns": messages})
        )

    def _split_generators(self, _):
        return {"test": self._generate_examples()}

    def _generate_examples(self):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        yield 0, {"question": "café?", "answer": "b", "turns": turns}
"""


def test_tfds(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets", reason="PACKAGE ABSENT: tensorflow-datasets was not tested")
    (tmp_path / "tiny_chats_builder").mkdir()
    (tmp_path / "tiny_chats_builder" / "tiny_chats.py").write_text(TFDS_BUILDER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("tiny_chats_builder.tiny_chats")
    module.TinyChats(data_dir=tmp_path / "data", file_format="array_record").download_and_prepare()
    tfds.core.add_data_dir(tmp_path / "data")
    assert read("tfds:tiny_chats", "test") == [
        [{"role": "user", "content": "café?"}, {"role": "assistant", "content": "b"}]
    ]
    (row,) = (row for _, row in sources._tfds_rows("tiny_chats", "test", None))
    assert as_messages({"messages": row["turns"]}, "here", DataConfig()) == CHAT
    with pytest.raises(UserError, match="tfds data set 'tiny_chats'"):
        read("tfds:tiny_chats", "train")
    with pytest.raises(UserError, match="tfds data set 'no_such_chats'"):
        read("tfds:no_such_chats")


def test_synthetic_is_the_default():
    cfg = DataConfig(max_rows=30, eval_rows=7)
    assert len(training_chats(cfg)) == 30
    assert len(held_out_chats(cfg)) == 7


def test_held_out_chats_are_taken_out_of_the_training_chats(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "answer": "b"}) + "\n" for i in range(400)))
    cfg = DataConfig(path=str(path), eval_rows=10, max_rows=300)
    train = [chat[0]["content"] for chat in training_chats(cfg)]
    held_out = [chat[0]["content"] for chat in held_out_chats(cfg)]
    assert len(train) == 290 and len(held_out) == 10
    assert sorted(train + held_out, key=int) == [str(i) for i in range(300)]
    few = DataConfig(path=str(path), eval_rows=10, max_rows=40)
    assert (len(training_chats(few)), len(held_out_chats(few))) == (36, 4)


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
