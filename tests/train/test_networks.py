"""Tests of the trained networks, against numpy in float64 and the files that they become. 10 seconds; needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dflash_ggml.drafts.mtp.convert import write_with_head  # noqa: E402
from dflash_ggml.files.gguf import GGUFFile  # noqa: E402
from dflash_ggml.files.safetensors import SafetensorsFile  # noqa: E402
from dflash_ggml.train.block_net import BlockNet, Tables  # noqa: E402
from dflash_ggml.train.losses import biased_loss, candidate_loss, token_loss  # noqa: E402
from dflash_ggml.train.publish import publish, start_from  # noqa: E402
from dflash_ggml.train.recipe import Shape, TargetSizes, shape_of  # noqa: E402
from reference import toys  # noqa: E402
from reference.checkpoints import write_checkpoint  # noqa: E402
from reference.numpy_draft import BlockDraft, PredictionHead  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "windows": {"window": 6, "full_layers": 1, "causal": False},
    "windows of which nothing is said": {"window": 6, "full_layers": 1},
    "dflash2": {"draft": "dflash2", "causal": False},
    "dspark": {"draft": "dspark", "confidence": True},
    "gated, from the masks": {"draft": "dspark", "gated": True, "from_anchor": False, "confidence": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_computes_what_its_file_does(tmp_path: Path, kind: str) -> None:
    """Weights of a toy draft, taken over from its folder: the same rows and chains as numpy's from the file, at every anchor."""
    options = KINDS[kind]
    target, gguf = toys.write_pair(
        tmp_path, 11, n_vocab=300, shared=1.0, draft_own=1.5, draft_tokens=True, pair_scale=2.0, **options
    )
    schema: Any = "deepspec" if options.get("draft") == "dspark" else "z-lab"
    given = {"sample_from_anchor": options.get("from_anchor", True)} if schema == "deepspec" else {}
    folder = write_checkpoint(tmp_path / "draft", gguf, schema, **given)
    config = json.loads((folder / "config.json").read_text())
    shape = shape_of(config, folder)
    wanted = BlockDraft(gguf, target)
    sizes = TargetSizes(4, config["hidden_size"], 0, config["vocab_size"], wanted.theta, 1e-6, 0)
    net = BlockNet(shape, sizes).double()
    assert start_from(folder, net) == []
    tables = Tables(torch.from_numpy(wanted.embedding), torch.from_numpy(wanted.head))
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2, 24, len(shape.taps) * sizes.n_embd))
    ids = rng.integers(0, sizes.n_vocab, (2, 24))
    anchors = np.array([[3, 3, 9], [2, 11, 15]])
    inputs = (torch.from_numpy(ids), torch.from_numpy(features), torch.from_numpy(anchors))
    with torch.no_grad():
        hidden, chains = net(tables, *inputs).numpy(), net.chain(tables, *inputs).tolist()
    for row, block in np.ndindex(anchors.shape):
        at = anchors[row, block]
        np.testing.assert_allclose(
            hidden[row, block], wanted.hidden(features[row, :at], ids[row, at]), rtol=1e-4, atol=1e-4
        )
        assert chains[row][block] == wanted.chain(features[row, :at], ids[row, at], shape.candidates)
    assert len({tuple(c) for row in chains for c in row}) > 2, "the toy drafts different things"
    publish(tmp_path / "again", net, config, torch.float32)
    a, b = SafetensorsFile(folder), SafetensorsFile(tmp_path / "again")
    assert {n: a.data(n).tobytes() for n in b.tensors} == {n: b.data(n).tobytes() for n in b.tensors}
    assert set(a.tensors) - set(b.tensors) <= {"lm_head.weight", "embed_tokens.weight"}


def test_a_prediction_head_computes_what_its_file_does(tmp_path: Path, twins) -> None:
    from dflash_ggml.train.head_net import HeadNet
    from dflash_ggml.train.target import TargetModel

    target = TargetModel(twins.folder, "cpu", torch.float32)
    torch.manual_seed(0)
    net = HeadNet(Shape("mtp", 1, 0, 1, 1, 2, 0, (), 0, n_steps=3), target.sizes, target.decoder)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p) * (p.ndim < 2))
    publish(tmp_path, net, {}, torch.float32)
    (tmp_path / "config.json").write_text("{}")
    with GGUFFile(twins.gguf) as file:
        write_with_head(tmp_path, file, tmp_path / "with-head.gguf")
    head = PredictionHead(tmp_path / "with-head.gguf")
    ids = np.random.default_rng(0).integers(0, 200, 12)
    given = torch.from_numpy(ids)[None]
    raw: list[Any] = []
    hook = target.decoder.norm.register_forward_pre_hook(lambda module, args: raw.append(args[0]))
    h = target.features(given, ())
    hook.remove()
    with torch.no_grad():
        chain = net.chain(target.tables, given, h, torch.tensor([[7, 10]]))[0].tolist()
    for anchor, drafted in zip((7, 10), chain):
        rows = head.rows(ids[: anchor + 1].tolist(), raw[0][0, :anchor].double().numpy(), 3)
        assert drafted == rows.argmax(-1).tolist()
    assert chain[0] != chain[1]


def test_losses_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_ggml.train import losses

    torch.manual_seed(0)
    head, after = torch.randn(50, 8), torch.randn(50, 4, requires_grad=True)
    labels, weights = torch.randint(0, 50, (9,)), torch.rand(9)
    x, b = (torch.randn(9, n, requires_grad=True) for n in (8, 4))
    found = []
    for piece in (1 << 20, 100):
        monkeypatch.setattr(losses, "PIECE", piece)
        total = token_loss(head, x, labels, weights) + biased_loss(head, after, x, b, labels, weights)
        total = total + candidate_loss(head, after, 5, x, b, labels, weights)
        found.append([total.detach(), *torch.autograd.grad(total, (x, b, after))])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_right_token_outside_the_candidates_is_learnt_too() -> None:
    """Its pair score gets a gradient though the plain logits rank it last."""
    head, after = torch.eye(6) * 3, torch.zeros(6, 2, requires_grad=True)
    hidden, before = torch.tensor([[5.0, 4, 3, 0, 0, -9]]), torch.ones(1, 2)
    candidate_loss(head, after, 2, hidden, before, torch.tensor([5]), torch.ones(1)).backward()
    assert (after.grad[5] < 0).all() and (after.grad[0] > 0).all() and not after.grad[2:5].any()
