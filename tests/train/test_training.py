"""Tests of `dflash-train` from beginning to end on a toy target: its own text, training, resuming, converting. 10 seconds; needs
torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

loop = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5").torch_recurrent_gated_delta_rule

from dflash_ggml.cli import convert as convert_command  # noqa: E402
from dflash_ggml.config import EngineConfig  # noqa: E402
from dflash_ggml.decode.tree import spine  # noqa: E402
from dflash_ggml.train import cli as command  # noqa: E402
from dflash_ggml.train.corpus import Rows, load_rows  # noqa: E402
from dflash_ggml.train.gated_delta import chunked, one_by_one  # noqa: E402
from dflash_ggml.train.target import TargetModel  # noqa: E402
from reference.engine_kit import Solo  # noqa: E402

SIZES = (
    "--layers 1 --ffn 64 --heads 2 --kv-heads 1 --head-dim 32 --block 6 --rank 32 --candidates 6 --taps 0,2"
)
RUN = "--length 64 --anchors 8 --batch 4 --lr 3e-3 --warm-up 2 --held 4 --device cpu"


def train(twins, out: Path, *options: str) -> int:
    return command.main([str(twins.folder), "-o", str(out), *" ".join(options).split()])


@pytest.fixture(scope="module")
def own_text(twins, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own")
    options = f"--data {texts} --own-text 900 --prompt 16 --write-batch 8 --greedy 1 --steps 1"
    assert train(twins, out, SIZES, RUN, options) == 0
    return out / "own-text.npz"


def test_the_target_writes_what_it_would(twins, own_text: Path) -> None:
    """Greedy rows are the target's own choices, whatever the batch that they were written in."""
    rows = load_rows(own_text)
    assert len(rows) == 900 // 48 and (rows.start == 16).all()
    model = TargetModel(twins.folder, "cpu", torch.float32).model
    with torch.no_grad():
        choices = model(input_ids=torch.from_numpy(rows.ids[:4].astype(np.int64))).logits.argmax(-1).numpy()
    for row, choice, stop in zip(rows.ids, choices, rows.stop):
        assert (row[16:stop] == choice[15 : stop - 1]).all()


def test_resumed_generation_gives_the_same_text(twins) -> None:
    """Drawn rows too, of prompts of several lengths."""
    target = TargetModel(twins.folder, "cpu", torch.float32)
    prompts = [[10 + i] * (3 + i % 2) for i in range(6)]
    whole = list(target.write(prompts, 12, [1.0] * 6, 2, 5))
    rest = list(target.write(prompts, 12, [1.0] * 6, 2, 5, done=2))
    assert len(whole) == 3 and len(rest) == 2 and whole[0].start.tolist() == [3, 3]
    for a, b in zip(whole[1:], rest):
        assert (a.ids == b.ids).all() and (a.start == b.start).all() and (a.stop == b.stop).all()
    assert (whole[1].ids[0][4:] != whole[2].ids[0][4:]).any()


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "dspark --gated", "mtp --draft-steps 3"])
def test_every_kind_learns_and_runs(
    twins, own_text: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls; the folder becomes a file; the engine drafts with it what the network does."""
    out = tmp_path / "out"
    assert train(twins, out, SIZES, RUN, f"--data {own_text} --steps 12 --kind {kind}") == 0
    printed = capsys.readouterr().out
    assert "held-out rows: a chain has" in printed
    losses = [
        float(line.split("loss ")[1].split(",")[0])
        for line in printed.splitlines()
        if line.startswith("step")
    ]
    state = torch.load(out / "training.pt", weights_only=True)
    assert state["step"] == 12 and losses[-1] < losses[0]
    file = tmp_path / "made.gguf"
    assert convert_command.main([str(out), "-m", str(twins.gguf), "-o", str(file)]) == 0
    is_head = kind.startswith("mtp")
    config = EngineConfig(
        file if is_head else twins.gguf,
        None if is_head else file,
        n_ctx=128,
        n_threads=1,
        type_k="f32",
        type_v="f32",
        reference=True,
        calibrate="never",
    )
    ids = load_rows(own_text).ids[0][:40].tolist()
    with Solo.load(config) as engine:
        assert engine.drafter is not None
        engine.prefill(ids[:-1])
        engine.sequence.pending = ids[-1]
        rows = engine.drafter.propose([engine.sequence], 31)[0]
        drafted = spine(ids[-1], rows, engine.drafter.depth).tokens[1:].tolist()
    wanted = chain(twins, out, ids, kind)
    assert drafted[: len(wanted)] == wanted[: len(drafted)] and drafted


def chain(twins, out: Path, ids: list[int], kind: str) -> list[int]:
    """What the published folder's network drafts behind the last of `ids`, in torch."""
    import json

    from dflash_ggml.train.block_net import BlockNet
    from dflash_ggml.train.head_net import HeadNet
    from dflash_ggml.train.publish import start_from
    from dflash_ggml.train.recipe import Shape, shape_of

    target = TargetModel(twins.folder, "cpu", torch.float32)
    if kind.startswith("mtp"):
        shape = Shape("mtp", 1, 0, 1, 1, 2, 0, (), 0, n_steps=3)
        net = HeadNet(shape, target.sizes, target.decoder)
    else:
        shape = shape_of(json.loads((out / "config.json").read_text()), out)
        net = BlockNet(shape, target.sizes)
    assert start_from(out, net) == []
    given = torch.tensor([ids])
    features = target.features(given, () if kind.startswith("mtp") else shape.taps)
    return net.chain(target.tables, given, features, torch.tensor([[len(ids) - 1]]))[0, 0].tolist()


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not(twins, own_text: Path, tmp_path: Path) -> None:
    options = (SIZES, RUN, f"--data {own_text} --kind dflash2 --steps 6")
    assert train(twins, tmp_path / "whole", *options) == 0
    half = tmp_path / "half"

    class Interrupt(command.Interrupt):
        asked_for = 0

        @property
        def asked(self) -> bool:
            self.asked_for += 1
            return self.asked_for > 3

        @asked.setter
        def asked(self, value: bool) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "Interrupt", Interrupt)
        assert train(twins, half, *options) == 130
    assert torch.load(half / "training.pt", weights_only=True)["step"] == 3
    assert train(twins, half, *options, "--resume") == 0
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "half"))
    assert a == b


def test_a_draft_to_start_from(
    twins, own_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(twins, tmp_path / "one", SIZES, RUN, f"--data {own_text} --steps 1") == 0
    two = (
        f"--data {own_text} --steps 1 --kind dflash2 --rank 32 --candidates 6 --start-from {tmp_path / 'one'}"
    )
    assert train(twins, tmp_path / "two", RUN, two) == 0
    assert "7 tensors of this draft are not in it" in capsys.readouterr().out
    weights = load_file(tmp_path / "one" / "model.safetensors")
    embedding = TargetModel(twins.folder, "cpu", torch.float32).tables.embedding.bfloat16()
    for scale, code in ((1, 0), (2, 1)):
        own = weights | {"embed_tokens.weight": embedding * scale}
        save_file(own, tmp_path / "one" / "model.safetensors")
        begun = f"--data {own_text} --steps 1 --start-from {tmp_path / 'one'}"
        assert train(twins, tmp_path / f"own{scale}", RUN, begun) == code
    assert "tensor 'embed_tokens.weight' is not the target's" in capsys.readouterr().err
    save_file(weights, tmp_path / "one" / "model.safetensors")
    other = f"--data {own_text} --steps 1 --ffn 96 --start-from {tmp_path / 'one'}"
    assert train(twins, tmp_path / "three", RUN, other) == 1
    assert "give the same sizes" in capsys.readouterr().err
    assert (
        train(
            twins,
            tmp_path / "one",
            RUN,
            SIZES,
            f"--data {own_text} --steps 2 --rank 8 --kind dspark --resume",
        )
        == 1
    )
    assert "differs in" in capsys.readouterr().err


def test_errors_are_one_line(
    twins, own_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (f"--data {own_text}", "--steps or --minutes"),
        ("--steps 1", "--data: no row of 64 tokens"),
        (f"--data {own_text} --steps 1 --resume", "nothing to go on from"),
        (f"--data {own_text} --steps 1 --mask-id 900", "--mask-id 900"),
    ):
        assert train(twins, tmp_path / "out", SIZES, RUN, options) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert command.main([str(tmp_path / "none"), "-o", str(tmp_path / "out"), "--steps", "1"]) == 1
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "message"),
    [(None, "the loss is nan at step 5"), (torch.OutOfMemoryError("CUDA out of memory."), "--batch")],
)
def test_a_step_that_goes_wrong_writes_nothing(
    twins,
    own_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    fault,
    message: str,
) -> None:
    """The fifth of five steps, after which no progress line is printed."""
    from dflash_ggml.train.loop import Trainer

    def one(self, real=Trainer.one):
        loss = real(self)
        if self.step < 5:
            return loss
        if fault is not None:
            raise fault
        return loss * float("nan")

    monkeypatch.setattr(Trainer, "one", one)
    assert train(twins, tmp_path / "out", SIZES, RUN, f"--data {own_text} --steps 5") == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


def test_the_embedded_target(
    demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small draft learns some of its greedy text by heart in a few seconds; the features are the fixtures' own."""
    from fixtures import greedy_cases

    ids = np.array([case.greedy for case in greedy_cases()], np.int32).reshape(16, 100)
    Rows(ids, np.full(16, 8), np.full(16, 100)).save(tmp_path / "text.npz")
    options = f"--data {tmp_path / 'text.npz'} --kind dflash2 --steps 60 --layers 1 --ffn 128 --heads 2 --kv-heads 1"
    options += " --head-dim 64 --block 5 --rank 32 --candidates 6 --taps 7,13 --mask-id 8189 --length 100 --anchors 12"
    options += " --batch 4 --lr 5e-3 --warm-up 5 --held 2 --device cpu"
    assert command.main([str(demo_checkpoint), "-o", str(tmp_path / "out"), *options.split()]) == 0
    printed = capsys.readouterr().out
    losses = [
        float(line.split("loss ")[1].split(",")[0])
        for line in printed.splitlines()
        if line.startswith("step")
    ]
    accepted = float(printed.split("a chain has ")[1].split()[0])
    assert losses[0] > 10 and losses[-1] < 0.7 * losses[0] and accepted > 1.05


@pytest.mark.parametrize("function", [chunked, one_by_one])
@pytest.mark.parametrize("continued", [False, True])
def test_the_delta_rule_is_transformers_own(function, continued: bool) -> None:
    torch.manual_seed(0)
    rows, n, heads, values, d = 2, 150, 2, 4, 16
    q, k, v = (torch.randn(rows, n, h, d) for h in (heads, heads, values))
    g, beta = -torch.rand(rows, n, values), torch.rand(rows, n, values)
    state = torch.randn(rows, values, d, d) if continued else None
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    wanted = loop(q, k, v, initial_state=None if state is None else state.clone(), **options)
    found = function(q, k, v, initial_state=None if state is None else state.clone(), **options)
    for a, b in zip(wanted, found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
