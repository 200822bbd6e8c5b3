"""Text from a prompt and a context file: what is written is what a hand loop over plain forwards chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory, TransfoXLTokenizer
from hf_txl.cli import app
from hf_txl.text_generation import generate_text, read_context
from hf_txl.tokenization_transfo_xl import encode_file

WORDS = ["<eos>", "<unk>", *"the cat sat on a mat , . and it was red not blue said dog".split()]
CONTEXT = "the cat sat on a mat .\n\nit was red , and not blue .\nthe dog said it was .\n" * 3


@pytest.fixture
def tokenizer() -> TransfoXLTokenizer:
    return TransfoXLTokenizer.from_vocabulary(WORDS, "pretokenized")


@pytest.fixture
def model() -> TransfoXLForCausalLM:
    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=len(WORDS),
        cutoffs=[6],
        div_val=1,
        d_model=16,
        n_head=2,
        n_layer=2,
        mem_len=7,
        clamp_len=-1,
        same_length=True,
        memory_init="zeros",
        eos_token_id=0,
    )
    model = TransfoXLForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture
def context_file(tmp_path: Path) -> Path:
    path = tmp_path / "context.txt"
    path.write_text(CONTEXT, encoding="utf-8")
    return path


@torch.no_grad()
def by_hand(
    model: TransfoXLForCausalLM, ids: list[int], new_tokens: int, suppressed: list[int] | None = None
) -> list[int]:
    """Greedy, one forward per token, everything before it in one memory of its own."""
    memory, chosen = TransfoXLMemory(model.config), []
    step = torch.tensor([ids])
    for _ in range(new_tokens):
        scores = model(step, cache=memory).logits[0, -1]
        scores[suppressed or []] = -torch.inf
        chosen.append(int(scores.argmax()))
        step = torch.tensor([[chosen[-1]]])
    return chosen


def context_ids(tokenizer: TransfoXLTokenizer, path: Path) -> list[int]:
    return [
        tokenizer.convert_tokens_to_ids(word) for line in CONTEXT.splitlines() for word in [*line.split(), "<eos>"]
    ]


@pytest.mark.parametrize("segment_length", [1, 5, 128])
def test_a_context_read_in_segments_is_what_the_prompt_goes_on_from(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, context_file: Path, segment_length: int
) -> None:
    result = generate_text(
        model,
        tokenizer,
        "the dog",
        context_file=context_file,
        temperature=0,
        max_new_tokens=20,
        segment_length=segment_length,
        progress=False,
    )
    context = context_ids(tokenizer, context_file)
    prompt = tokenizer("the dog")["input_ids"]
    assert result.token_ids == by_hand(model, context + prompt, 20)
    assert result.context_tokens == len(context)


def test_without_a_prompt_the_last_token_of_the_context_is_gone_on_from(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, context_file: Path
) -> None:
    result = generate_text(
        model, tokenizer, context_file=context_file, temperature=0, max_new_tokens=9, progress=False
    )
    assert result.token_ids == by_hand(model, context_ids(tokenizer, context_file), 9)


def test_reading_leaves_the_memory_where_one_segment_leaves_it(model: TransfoXLForCausalLM) -> None:
    ids = torch.arange(40) % len(WORDS)
    memories = [TransfoXLMemory(model.config, stores="hidden_states") for _ in range(2)]
    read_context(model, ids, memories[0], segment_length=7, progress=False)
    with torch.no_grad():
        model(ids[None], cache=memories[1])
    for ours, theirs in zip(memories[0].to_mems(), memories[1].to_mems(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("new_tokens", [5, 700])
def test_pieces_are_the_text(model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, new_tokens: int) -> None:
    pieces: list[str] = []
    result = generate_text(
        model, tokenizer, "the cat", max_new_tokens=new_tokens, top_k=0, temperature=2.0, write=pieces.append
    )
    assert "".join(pieces) == result.text
    assert len(result.token_ids) == new_tokens
    # an end-of-line token neither ends the text nor is shown as a token
    assert "<eos>" not in result.text
    assert result.text.count("\n") == result.token_ids.count(0)
    words = result.text.split()
    assert words == [WORDS[token] for token in result.token_ids if token != 0]


def test_a_seed_gives_the_same_text_and_another_one_another(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer
) -> None:
    """C76: the recipe with a context, top-k and temperature is `generate_text`."""
    texts = [generate_text(model, tokenizer, "it", seed=seed, max_new_tokens=30).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_unknown_token_can_be_kept_out(model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer) -> None:
    with torch.no_grad():
        model.crit.out_layers[0].bias[1] += 20
    free = generate_text(model, tokenizer, "it", temperature=0, max_new_tokens=5)
    assert free.token_ids == [1] * 5
    kept_out = generate_text(model, tokenizer, "it", temperature=0, max_new_tokens=5, suppress_unknown=True)
    assert kept_out.token_ids == by_hand(model, tokenizer("it")["input_ids"], 5, suppressed=[1])


def test_stop_strings_end_the_text(model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer) -> None:
    free = generate_text(model, tokenizer, "the", temperature=2.0, top_k=0, max_new_tokens=60)
    word = free.text.split()[7]
    stopped = generate_text(
        model, tokenizer, "the", temperature=2.0, top_k=0, max_new_tokens=60, stop_strings=[f" {word}"]
    )
    assert free.text.startswith(stopped.text)
    assert len(stopped.token_ids) < 60
    assert stopped.text.endswith(word)


def test_a_line_break_that_is_shown_can_end_the_text(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer
) -> None:
    """In a word-level vocabulary it is an end token, which no decoded text shows as a line break."""
    free = generate_text(model, tokenizer, "the", temperature=2.0, top_k=0, max_new_tokens=60)
    stopped = generate_text(
        model, tokenizer, "the", temperature=2.0, top_k=0, max_new_tokens=60, stop_strings=["\n", "never"]
    )
    assert "\n" in free.text
    assert stopped.text == free.text[: free.text.index("\n") + 1]


def test_a_probability_of_zero_leaves_the_likeliest_token(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer
) -> None:
    ids = tokenizer("the cat")["input_ids"]
    for seed in range(3):
        result = generate_text(model, tokenizer, "the cat", top_p=0.0, top_k=0, seed=seed, max_new_tokens=8)
        assert result.token_ids == by_hand(model, ids, 8)
        assert result.settings["top_p"] == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"return_dict_in_generate": True, "output_scores": True},
        {"prefill_chunk_size": 2},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"max_length": 3},
    ],
)
def test_what_a_folder_says_of_generation_does_not_disturb(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, settings: dict[str, Any]
) -> None:
    expected = by_hand(model, tokenizer("the cat on a mat")["input_ids"], 6)
    model.generation_config.update(**settings)
    pieces: list[str] = []
    result = generate_text(model, tokenizer, "the cat on a mat", temperature=0, max_new_tokens=6, write=pieces.append)
    assert result.token_ids == expected
    assert "".join(pieces) == result.text


def test_stop_strings_of_a_folder_end_the_text(model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer) -> None:
    free = generate_text(model, tokenizer, "the", temperature=2.0, top_k=0, max_new_tokens=60)
    word = free.text.split()[7]
    model.generation_config.stop_strings = [f" {word}"]
    stopped = generate_text(model, tokenizer, "the", temperature=2.0, top_k=0, max_new_tokens=60)
    assert free.text.startswith(stopped.text) and stopped.text.endswith(word)


def test_a_context_that_is_no_text_is_named(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt must be a text in UTF-8, but is not"):
        generate_text(model, tokenizer, "it", context_file=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "`prompt` or `context_file`"),
        ({"prompt": "it", "max_new_tokens": 0}, "`max_new_tokens` must be an int of at least 1, but is 0"),
        ({"prompt": "it", "max_new_tokens": 2.5}, "`max_new_tokens` must be an int of at least 1, but is 2.5"),
        ({"prompt": "it", "segment_length": 0}, "`segment_length` must be an int of at least 1"),
        ({"prompt": "it", "temperature": -1.0}, "`temperature` must be 0 .* or at least 1e-30, but is -1.0"),
        ({"prompt": "it", "temperature": float("nan")}, "`temperature` must be 0 .*, but is nan"),
        ({"prompt": "it", "temperature": 1e-320}, "`temperature` must be 0 "),
        ({"prompt": "it", "top_k": -1}, "`top_k` must be 0 .*, but is -1"),
        ({"prompt": "it", "top_p": 1.5}, "`top_p` must be between 0 and 1, but is 1.5"),
        ({"prompt": "it", "seed": -1}, "`seed` must be between 0 and .*, but is -1"),
        ({"prompt": "it", "stop_strings": ["dog", ""]}, "`stop_strings` must be non-empty texts"),
    ],
)
def test_wrong_arguments_are_named(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate_text(model, tokenizer, **arguments)


def test_a_tokenizer_of_another_model_is_refused(model: TransfoXLForCausalLM) -> None:
    other = TransfoXLTokenizer.from_vocabulary([*WORDS, "more"], "pretokenized")
    with pytest.raises(ValueError, match="`tokenizer` must have at most as many tokens"):
        generate_text(model, other, "it")


def test_the_command_streams_text_or_prints_one_json_object(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, context_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = [
        *("generate", str(folder), "--prompt", "the dog", "--context-file", str(context_file)),
        *("--temperature", "0", "--max-new-tokens", "12"),
    ]
    expected = by_hand(model, context_ids(tokenizer, context_file) + tokenizer("the dog")["input_ids"], 12)
    printed = CliRunner().invoke(app, [*options, "--json"])
    assert printed.exit_code == 0, printed.output
    result = json.loads(printed.stdout)
    assert result["token_ids"] == expected
    assert (result["prompt"], result["context_tokens"]) == ("the dog", len(encode_file(tokenizer, context_file)))
    streamed = CliRunner().invoke(app, options)
    assert streamed.stdout == "the dog" + result["text"] + "\n"
    refused = CliRunner().invoke(app, [*options, "--seed", "-1"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "Error: `seed` must be" in refused.stderr
    missing = CliRunner().invoke(app, ["generate", str(tmp_path / "nothing"), "--prompt", "it"])
    assert missing.exit_code == 2
    assert "Error:" in missing.output


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\x10\x02\x00\x00\x00\x00\x00\x00{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "transfo-xl", "n_layer": "2"}'),
        ("config.json", b"\xff\xfe"),
    ],
)
def test_a_damaged_folder_is_one_message(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, tmp_path: Path, name: str, content: bytes
) -> None:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / name).write_bytes(content)
    result = CliRunner().invoke(app, ["generate", str(folder), "--prompt", "it"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("prompt", ["the cat <eos> it was", "it <eos>", "<eos>"])
def test_end_tokens_of_a_prompt_are_read(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, prompt: str
) -> None:
    """Their id is 0, which the library takes for a pad."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert 0 in ids
    predicted: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: predicted.append(output.logits[0, -1]))
    generate_text(model, tokenizer, prompt, temperature=0, max_new_tokens=2)
    hook.remove()
    with torch.no_grad():
        expected = model(torch.tensor([ids]), cache=TransfoXLMemory(model.config)).logits[0, -1]
    # of tokens that cannot be the likeliest there need be no scores
    read = predicted[0].isfinite()
    assert read.sum() > 1
    assert torch.allclose(predicted[0][read], expected[read], atol=1e-5)
