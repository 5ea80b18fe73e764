"""A GGUF file written by hand, tensor by tensor, is read as the transformers model it was made from."""

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import executor.converted_model
from executor.converted_model import cache_home, converted_model
from executor.gguf_weights import GgufFile
from sim.errors import BadInput

gguf = pytest.importorskip("gguf", reason="the extra smollm2 is not installed")

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 8, 4, 2
MERGES = ["h e", "l l", "he ll", "Ġ w"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
LLAMA_CPP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def llama_cpp_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{LLAMA_CPP_NAMES[rest]}.{kind}"
    return f"{LLAMA_CPP_NAMES[stem]}.{kind}"


def paired(values: np.ndarray) -> np.ndarray:
    """Rows of each head as llama.cpp keeps them: dimension i beside the one it is rotated with, i + HEAD_DIM / 2."""
    order = [d for i in range(HEAD_DIM // 2) for d in (i, i + HEAD_DIM // 2)]
    rows = [head * HEAD_DIM + d for head in range(len(values) // HEAD_DIM) for d in order]
    return values[rows]


def write_gguf(
    path, model: LlamaForCausalLM, *, quantised: bool = False, split: str = "smollm", **more: object
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(NUM_HEADS * HEAD_DIM)
    writer.add_feed_forward_length(64)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            values = paired(values)
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(llama_cpp_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(llama_cpp_name(name), values)
    for name, values in more.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def file(tmp_path, model):
    write_gguf(tmp_path / "tiny.gguf", model)
    return tmp_path / "tiny.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saguaro-planner"


@torch.inference_mode()
def test_a_converted_file_is_the_model_it_was_made_from(file, model, cache) -> None:
    folder = converted_model(file)
    again = LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.arange(20)[None]
    assert folder.parent == cache and cache_home() == cache
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    # Rows of heads left in llama.cpp's order are another model.
    query = again.model.layers[0].self_attn.q_proj.weight
    query.copy_(torch.from_numpy(paired(query.numpy().copy())))
    assert not torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-2)


def test_blocks_are_dequantised(tmp_path, model) -> None:
    write_gguf(tmp_path / "blocks.gguf", model, quantised=True)
    weights = GgufFile(tmp_path / "blocks.gguf").weights()
    for name, expected in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        blocks = expected.reshape(-1, 32) if expected.ndim == 2 else expected[:, None]
        half_step = (blocks.amax(1) - blocks.amin(1)) / 15 / 2
        found = torch.tensor(weights[name])
        assert found.dtype == torch.float32 and found.shape == expected.shape
        # Half a step of the block and the rounding of its two half-precision numbers; 0 for vectors. Rows of the query
        # and key keep their blocks when they move.
        error = (found - expected).abs().reshape(len(blocks), -1).amax(1)
        assert (error <= 1.02 * half_step + 2e-3 * blocks.abs().amax(1) * (expected.ndim == 2)).all(), name


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(file) -> None:
    tokenizer = GgufFile(file).tokenizer()
    assert tokenizer.encode("<|im_start|>hello w12").tokens == ["<|im_start|>", "hell", "o", "Ġw", "1", "2"]
    text = "Grüße, hello  world\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == len(TOKENS)


def test_the_second_time_nothing_is_converted(file, cache, monkeypatch) -> None:
    first = converted_model(file)
    monkeypatch.setattr(executor.converted_model, "convert", lambda *_: pytest.fail("converted again"))
    assert converted_model(file) == first


def test_a_conversion_that_breaks_off_leaves_nothing(file, cache, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(GgufFile, "weights", lambda _: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            converted_model(file)
    assert list(cache.iterdir()) == []
    assert (converted_model(file) / "model.safetensors").is_file()


def test_of_two_conversions_at_once_one_is_kept(file, cache, monkeypatch) -> None:
    convert = executor.converted_model.convert

    def slow(gguf_file, folder) -> None:
        """While this process works, another one finishes."""
        convert(gguf_file, folder)
        monkeypatch.setattr(executor.converted_model, "convert", convert)
        converted_model(file)

    monkeypatch.setattr(executor.converted_model, "convert", slow)
    folder = converted_model(file)
    assert list(cache.iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_another_file_gets_another_folder(file, tmp_path, model, cache) -> None:
    first = converted_model(file)
    write_gguf(tmp_path / "tiny.gguf", model, quantised=True)
    assert converted_model(file) != first


def test_what_is_not_gguf_is_refused(tmp_path) -> None:
    (tmp_path / "text.gguf").write_bytes(b"no model" * 100)
    with pytest.raises(BadInput, match=r"text.gguf: must be a GGUF file"):
        GgufFile(tmp_path / "text.gguf")


def test_another_way_of_splitting_text_is_refused(tmp_path, model) -> None:
    write_gguf(tmp_path / "other.gguf", model, split="llama-bpe")
    with pytest.raises(BadInput, match="splits as smollm's"):
        GgufFile(tmp_path / "other.gguf").tokenizer()


def test_a_tensor_that_no_llama_has_is_refused(tmp_path, model) -> None:
    write_gguf(tmp_path / "more.gguf", model, **{"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)})
    with pytest.raises(BadInput, match=r"tensors of a llama model, got 'blk.0.attn_sinks.weight'"):
        GgufFile(tmp_path / "more.gguf").weights()
