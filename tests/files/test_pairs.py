"""Tests of reading a model's name, and of which published draft belongs to which target."""

from __future__ import annotations

import pytest

from dflash_ggml.files import pairs
from dflash_ggml.files.hub import RepoSpec
from dflash_ggml.files.pairs import (
    EMBEDDED_DRAFT,
    EMBEDDED_TARGET,
    LIST_PAIRS,
    PAIRS,
    ModelName,
    Pair,
    find_pair,
    pairs_table,
    replacement,
)


def test_the_embedded_pair_is_there() -> None:
    assert EMBEDDED_TARGET.is_file() and EMBEDDED_DRAFT.is_file()


@pytest.mark.parametrize(
    ("texts", "family", "size"),
    [
        (["Qwen3.6-27B-UD-Q4_K_XL.gguf"], "Qwen3.6", "27B"),
        (["Qwen_Qwen3.5-9B-Q8_0-00001-of-00002.gguf"], "Qwen3.5", "9B"),
        (["dflash-Qwen3.8-27B-Q8_0.gguf"], "Qwen3.8", "27B"),
        (["unsloth/Qwen3.5-35B-A3B-GGUF"], "Qwen3.5", "35B-A3B"),
        (["Qwen3-Coder-Next-UD-Q4_K_XL-00001-of-00003.gguf"], "Qwen3", "Coder-Next"),
        (["Qwen3-Next-80B-A3B-Instruct-Q4_K_M.gguf"], "Qwen3", "80B-A3B"),
        (["sha256-5b27", "Qwen3.5 0.8B"], "Qwen3.5", "0.8B"),
        (["qwen3_4b.gguf"], "Qwen3", "4B"),
        (["Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf"], "Qwen3-Coder", "30B-A3B"),
        (["Qwen3-30B-A3B-Q4_K_M.gguf"], "Qwen3", "30B-A3B"),
        (["dflash-draft-3.6-q8_0.gguf", "Qwen3.6 27B DFlash"], "Qwen3.6", "27B"),
        (["model-27b.gguf", "Qwen3.5-9B"], "Qwen3.5", "27B"),  # what comes first is more specific
        (["Distill-Qwen-7B-Q4_K_M.gguf"], None, "7B"),
        (["Laguna-XS.2-Q4_K_M.gguf"], "Laguna", "XS.2"),
        (["poolside/laguna-xs-2.1-GGUF"], "Laguna", "XS-2.1"),
        (["Laguna XS 2.1"], "Laguna", "XS-2.1"),
        (["Laguna S 2.1"], "Laguna", "S-2.1"),
        (["laguna_xs_2.1_q4_k_m.gguf"], "Laguna", "XS-2.1"),
        (["Laguna-XS2.1"], "Laguna", "XS-2.1"),
        (["Laguna XS.2"], "Laguna", "XS.2"),
        (["laguna-xs2.gguf"], "Laguna", "XS.2"),
        (["Laguna-S-2.15"], None, None),
        (["Qwen/Qwen3-Embedding-4B-GGUF"], "Qwen3-Embedding", "4B"),
        (["qwen3-reranker-8b-q8_0.gguf"], "Qwen3-Reranker", "8B"),
        (["Qwen3VL-8B-Instruct-Q4_K_M.gguf"], "Qwen3-VL", "8B"),
        (["model-4B-f16.gguf", "Qwen3-4B-Embedding"], "Qwen3-Embedding", "4B"),
        (["Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"], "Llama3.1", "8B"),
        (["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"], "Llama3.1", "8B"),
        (["llama-3.2-1b-instruct-q8_0.gguf"], "Llama3.2", "1B"),
        (["DeepSeek-R1-Distill-Llama-8B-Q4_K_M.gguf"], None, "8B"),
        (["gpt-oss-20b-mxfp4.gguf"], "gpt-oss", "20B"),
        (["openai_gpt-oss-120b-MXFP4-00001-of-00003.gguf"], "gpt-oss", "120B"),
        (["x.gguf", "Gpt Oss 20B"], "gpt-oss", "20B"),
        (["gpt-oss-safeguard-20b-Q4_K_M.gguf"], None, "20B"),
        (["SmolLM2-135M-Instruct.Q4_1.gguf"], None, None),
        (["model-Q8_0.gguf"], None, None),
    ],
)
def test_names(texts: list[str], family: str | None, size: str | None) -> None:
    assert ModelName.of(*texts) == ModelName(family, size)


def test_names_that_contradict() -> None:
    name = ModelName("Qwen3.6", "27B")
    assert name.contradicts(ModelName("Qwen3.5", "27B")) and name.contradicts(ModelName(None, "9B"))
    assert not name.contradicts(ModelName()) and not name.contradicts(ModelName("Qwen3.6"))


def test_the_table_of_pairs() -> None:
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    for pair in PAIRS:
        assert find_pair(f"someone/{pair.name}-GGUF") is pair
        assert pair.note or (pair.loads and pair.draft)  # unusable ones give the reason
        for repo in (pair.draft, *pair.also):
            if repo:
                assert RepoSpec.parse(repo) and find_pair(repo) is pair
    table = pairs_table().splitlines()
    assert [line.split()[0] for line in table[1 : 1 + len(PAIRS)]] == [pair.name for pair in PAIRS]
    drafts = "spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0, z-lab/Qwen3.6-27B-DFlash"
    assert table[1].split(maxsplit=1) == ["Qwen3.6-27B", drafts]
    to_come = [line for line in table if "later version" in line]
    assert not to_come


def test_a_target_that_does_not_load_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    later = Pair("Gemma4", "31B", "z-lab/gemma-4-31B-it-DFlash", note="comes in a later version", loads=False)
    monkeypatch.setattr(pairs, "PAIRS", (*PAIRS, later))
    assert "no draft that can be used today" in replacement("z-lab/gemma-4-31B-it-DFlash")
    assert any(line.split()[-1] == "version" and later.name in line for line in pairs_table().splitlines())


def test_models_that_are_no_chat_models_have_no_pair() -> None:
    """They are called like the chat models, whose drafts would be fetched for them."""
    for name in ("Qwen3-Embedding-4B", "Qwen3-Reranker-8B", "Qwen3-VL-8B-Instruct", "Qwen3_4B_embedding"):
        assert find_pair(f"{name}-Q8_0.gguf", f"Qwen/{name}-GGUF") is None
        assert find_pair("Qwen3-4B-Q8_0.gguf", f"Qwen/{name}-GGUF") is None
        assert replacement(name) == LIST_PAIRS
    assert find_pair("Qwen3-4B-Q8_0.gguf", "vladimir/Qwen3-4B-GGUF") is not None
    assert ModelName.of("Qwen3-VL-8B").contradicts(ModelName.of("Qwen3-8B"))


def test_replacements() -> None:
    use = "for Qwen3.6-27B use spiritbuun/Qwen3.6-27B-DFlash-GGUF:Q8_0 or z-lab/Qwen3.6-27B-DFlash"
    assert replacement("x.gguf", "Qwen3.6 27B DFlash").startswith(use)
    assert "no draft that can be used today" in replacement("dflash-Qwen3.5-2B-Q8_0.gguf")
    assert replacement("my-35b-a3b-dflash", "Qwen3.6 35B A3B").startswith("for Qwen3.6-35B-A3B use z-lab/")
    assert replacement("x.gguf") == LIST_PAIRS
