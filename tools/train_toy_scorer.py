"""Trainer of the small `qwen35` model that shows what a prompt scorer finds and lexical matching cannot.

    python tools/train_toy_scorer.py -o toy-scorer.npz --minutes 4.5 [--sizes cpu]
    python tools/train_toy_scorer.py --gguf toy-scorer.gguf --weights toy-scorer.npz

Prompts are filler of a Markov chain with facts strewn in, and questions at the end. A question names a fact's key (kind
`same`), the key's synonym under a fixed permutation (`synonym`), a key whose fact names another key (`hops`), or asks how often
a key occurs (`count`). Training begins with two facts of kind `same`, asked for over and over: with six at once a model learns
to copy a value that was not asked for yet, and stays there. A fact is added whenever most first values of answers are right;
with six come all kinds, and then longer prompts, up to 16,384 tokens, so that no evaluation exceeds the training. Delta nets
forget within some tokens, and leave the facts to attention. It proves the plumbing, and that a model's attention beats lexical
matching; nothing about real prompts. Needs torch; a GPU for more than a trial. The second form needs no torch and writes the file
that `bench/selection_toys.py` reads.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CONTROL, FILLER, KEYS, VOCAB = 32, 256, 128, 1024
FIRST_KEY = CONTROL + FILLER
FIRST_SYNONYM, FIRST_VALUE = FIRST_KEY + KEYS, FIRST_KEY + 2 * KEYS
KEY, LINK, ASK, HOP, COUNT, DOT, FIRST_NUMBER = 1, 2, 3, 4, 5, 6, 8
NEEDLE, QUESTION, SLOTS, QUESTIONS = (
    5,
    5,
    12,
    6,
)  # tokens of a fact and of a question; facts and questions of a prompt
KINDS = ("same", "synonym", "hops", "count")
SHARES = (0.35, 0.35, 0.20, 0.10)
THETA, EPS, KERNEL = 1e6, 1e-6, 4
LOOK, ENOUGH = 50, 0.8  # steps, and right first values among them, before there is a fact more


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, and of what it is trained on. full: blocks with attention; stages: rows, tokens, part of the time.

    lr: the most; at width 256, key matching comes twice as late with 2e-3 as with 7e-4.
    """

    width: int
    layers: int
    ff: int
    heads: int
    kv_heads: int
    head: int
    rot: int
    k_heads: int
    v_heads: int
    state: int
    full: tuple[int, ...]
    lr: float
    stages: tuple[tuple[int, int, float], ...]


_LONG = ((64, 128, 0.55), (32, 512, 0.17), (16, 2048, 0.14), (4, 8192, 0.06), (4, 16384, 0.08))
_SHORT = ((16, 128, 0.75), (12, 512, 0.15), (3, 2048, 0.1))
SIZES = {
    "gpu": Sizes(256, 8, 640, 4, 2, 64, 16, 4, 8, 64, (3, 7), 7e-4, _LONG),
    "cpu": Sizes(64, 4, 160, 2, 1, 32, 8, 1, 2, 32, (1, 3), 2e-3, _SHORT),
}


def synonyms() -> np.ndarray:
    """The fixed permutation: synonym of each key."""
    return np.random.default_rng(42).permutation(KEYS)


def tape(n: int, seed: int) -> np.ndarray:
    """n tokens of filler: each has 8 successors."""
    rng = np.random.default_rng(7)
    successors = rng.integers(0, FILLER, (FILLER, 8))
    rng, chains = np.random.default_rng(seed), 4096
    out = np.empty((-(-n // chains), chains), np.int64)
    state = rng.integers(0, FILLER, chains)
    for row in out:
        row[:] = state = successors[state, rng.integers(0, 8, chains)]
    return out.T.reshape(-1)[:n] + CONTROL


def texts(
    n: int,
    length: int,
    filler: np.ndarray,
    rng: np.random.Generator,
    kinds: np.ndarray | None = None,
    facts: int = QUESTIONS,
) -> dict[str, np.ndarray]:
    """n prompts of `length` tokens: ids, `answer` (whether a token is of one), kinds, and where facts begin.

    Each of QUESTIONS facts is asked for once. Of fewer `facts`, which takes the kinds `same` and `synonym`, questions are drawn
    anew each time, and fill the prompt: nothing can be guessed by elimination, and most tokens are to be learnt from.

    Returns also `asked`, the slots of the facts that each question needs, -1 for none: [n, questions, 2].
    """
    kinds = rng.choice(len(KINDS), n, p=SHARES) if kinds is None else kinds
    few = facts < QUESTIONS
    n_slots = facts if few else SLOTS
    n_questions = (length - n_slots * (NEEDLE + QUESTION)) // QUESTION if few else QUESTIONS
    body = length - n_questions * QUESTION
    at = rng.integers(0, len(filler) - length, n)
    ids = filler[at[:, None] + np.arange(length)]
    answer = np.zeros((n, length), bool)
    each = body // n_slots
    places = np.arange(n_slots) * each + rng.integers(0, each - NEEDLE + 1, (n, n_slots))
    asked = np.full((n, n_questions, 2), -1)
    synonym = synonyms()
    for i, kind in enumerate(kinds):
        keys = rng.permutation(KEYS)
        slots = rng.permutation(n_slots)
        values = rng.integers(0, KEYS, (SLOTS, 2)) + FIRST_VALUE
        written: list[tuple[int, list[int]]] = []
        questions: list[list[int]] = []
        needed: list[tuple[int, int]] = []
        for q in range(facts):
            k, (v, w) = int(keys[q]), values[q].tolist()
            if kind < 2:
                written.append((slots[q], [KEY, FIRST_KEY + k, v, w, DOT]))
                word = FIRST_KEY + k if kind == 0 else FIRST_SYNONYM + int(synonym[k])
                questions.append([ASK, word, v, w, DOT])
                needed.append((slots[q], -1))
            elif kind == 2:
                other = int(keys[QUESTIONS + q])
                written.append((slots[q], [LINK, FIRST_KEY + k, FIRST_KEY + other, DOT, DOT]))
                written.append((slots[QUESTIONS + q], [KEY, FIRST_KEY + other, v, w, DOT]))
                questions.append([HOP, FIRST_KEY + k, v, w, DOT])
                needed.append((slots[q], slots[QUESTIONS + q]))
        if kind == 3:
            ends = np.sort(rng.choice(np.arange(1, SLOTS), 2, replace=False))
            parts = np.split(slots, ends)
            for part, k in zip(parts, keys):
                written += [(slot, [KEY, FIRST_KEY + int(k), *values[0].tolist(), DOT]) for slot in part]
            for q in range(QUESTIONS):
                k, part = int(keys[q % 3]), parts[q % 3]
                questions.append([COUNT, FIRST_KEY + k, FIRST_NUMBER + len(part), DOT, DOT])
                needed.append((part[0], -1))
        for slot, words in written:
            ids[i, places[i, slot] : places[i, slot] + NEEDLE] = words
        order = rng.integers(0, facts, n_questions) if few else rng.permutation(QUESTIONS)
        asked[i] = [needed[q] for q in order]
        for j, q in enumerate(order):
            start = body + j * QUESTION
            ids[i, start : start + QUESTION] = questions[q]
            answer[i, start + 2 : start + (3 if kind == 3 else 4)] = True
    return {"ids": ids, "answer": answer, "kinds": kinds, "places": places, "asked": asked}


def train(args: argparse.Namespace) -> None:
    """Train, report how well it answers and finds, and write the weights by their names in a GGUF file."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from dflash_ggml.train.gated_delta import chunked

    sizes = SIZES[args.sizes]
    width, heads, kv_heads, head, rot = sizes.width, sizes.heads, sizes.kv_heads, sizes.head, sizes.rot
    k_heads, v_heads, state, full = sizes.k_heads, sizes.v_heads, sizes.state, sizes.full
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
        return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)

    def norm(x, weight):
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS).to(x.dtype)

    inner, channels = v_heads * state, 2 * k_heads * state + v_heads * state
    small = (2 * sizes.layers) ** -0.5
    w = nn.ParameterDict()
    put = {"token_embd.weight": nn.Parameter(torch.randn(VOCAB, width) * 0.5)}
    # values are copied sooner if a token is written as it is read
    put["output.weight"] = nn.Parameter(put["token_embd.weight"].detach() * 16 / width)
    put |= {"output_norm.weight": nn.Parameter(torch.ones(width))}
    for i in range(sizes.layers):
        b = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm"):
            put[f"{b}{name}.weight"] = nn.Parameter(torch.ones(width))
        put |= {b + "ffn_gate.weight": matrix(sizes.ff, width), b + "ffn_up.weight": matrix(sizes.ff, width)}
        put[b + "ffn_down.weight"] = matrix(width, sizes.ff, small)
        if i in full:
            put[b + "attn_q.weight"] = matrix(2 * heads * head, width)
            put[b + "attn_k.weight"] = matrix(kv_heads * head, width)
            put[b + "attn_v.weight"] = matrix(kv_heads * head, width)
            put[b + "attn_output.weight"] = matrix(width, heads * head, small)
            for x in "qk":
                put[f"{b}attn_{x}_norm.weight"] = nn.Parameter(torch.ones(head))
        else:
            put[b + "attn_qkv.weight"] = matrix(channels, width)
            put[b + "attn_gate.weight"] = matrix(inner, width)
            put[b + "ssm_conv1d.weight"] = nn.Parameter(torch.randn(channels, KERNEL) * 0.5)
            put[b + "ssm_dt.bias"] = nn.Parameter(torch.linspace(-4, 0, v_heads) * args.remember)
            put[b + "ssm_a"] = nn.Parameter(
                -torch.linspace(*((0.3, 1.5) if args.remember else (1.5, 3)), v_heads)
            )
            put[b + "ssm_alpha.weight"] = nn.Parameter(matrix(v_heads, width).detach() * args.remember)
            put[b + "ssm_beta.weight"] = matrix(v_heads, width)
            put[b + "ssm_norm.weight"] = nn.Parameter(torch.ones(state))
            put[b + "ssm_out.weight"] = matrix(width, inner, small)
    if args.begin:
        known = np.load(args.begin)
        put = {name: nn.Parameter(torch.from_numpy(known[name]).float()) for name in put}
    for name, p in put.items():
        w[name.replace(".", "|")] = p
    w = w.to(device)
    p = {name: w[name.replace(".", "|")] for name in put}
    for name, x in p.items():
        # delta nets forget within some tokens: else they answer, and attention has nothing to find
        x.requires_grad_(args.remember or not any(part in name for part in ("ssm_a", "ssm_dt")))
    print(f"{sum(x.numel() for x in p.values()) / 1e6:.2f} M parameters on {device}", flush=True)
    pairs = torch.arange(rot // 2, device=device)
    frequencies = THETA ** (-2.0 * pairs / rot)

    def rope(x, positions):
        """x [B, T, H, head], the first rot dimensions rotated by halves; positions [B, T]."""
        angle = positions[..., None].float() * frequencies
        cos, sin = angle.cos()[:, :, None].to(x.dtype), angle.sin()[:, :, None].to(x.dtype)
        a, b, rest = x.split([rot // 2, rot // 2, head - rot], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(b, y, positions):
        rows, n, _ = y.shape
        q, gate = F.linear(y, p[b + "attn_q.weight"]).view(rows, n, heads, 2, head).unbind(3)
        k = F.linear(y, p[b + "attn_k.weight"]).view(rows, n, kv_heads, head)
        v = F.linear(y, p[b + "attn_v.weight"]).view(rows, n, kv_heads, head)
        q, k = norm(q, p[b + "attn_q_norm.weight"]), norm(k, p[b + "attn_k_norm.weight"])
        seen = q, k
        q, k = rope(q, positions), rope(k, positions)
        k, v = (x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        o = o.transpose(1, 2) * gate.sigmoid()
        return F.linear(o.reshape(rows, n, -1), p[b + "attn_output.weight"]), seen

    def delta_net(b, y):
        rows, n, _ = y.shape
        x = F.linear(y, p[b + "attn_qkv.weight"]).transpose(1, 2)
        x = F.conv1d(
            F.pad(x, (KERNEL - 1, 0)), p[b + "ssm_conv1d.weight"][:, None].to(x.dtype), groups=channels
        )
        x = F.silu(x).transpose(1, 2)
        q, k, v = x.split([k_heads * state, k_heads * state, inner], -1)
        # value head h reads key head h % k_heads
        q, k = (x.reshape(rows, n, k_heads, state).repeat(1, 1, v_heads // k_heads, 1) for x in (q, k))
        with torch.autocast(device, enabled=False):
            alpha = F.linear(y.float(), p[b + "ssm_alpha.weight"]) + p[b + "ssm_dt.bias"]
            decay = F.softplus(alpha) * p[b + "ssm_a"]
            beta = F.linear(y.float(), p[b + "ssm_beta.weight"]).sigmoid()
            v = v.reshape(rows, n, v_heads, state)
            o, _ = chunked(q.float(), k.float(), v.float(), decay, beta, use_qk_l2norm_in_kernel=True)
        z = F.silu(F.linear(y, p[b + "attn_gate.weight"])).view(rows, n, v_heads, state)
        o = norm(o, p[b + "ssm_norm.weight"]).to(y.dtype) * z
        return F.linear(o.reshape(rows, n, -1), p[b + "ssm_out.weight"])

    def model(ids, positions):
        """Logits [B, T, VOCAB], and by attention block its normalised queries and keys before the rotation."""
        x, seen = F.embedding(ids, p["token_embd.weight"]), {}
        for i in range(sizes.layers):
            b = f"blk.{i}."
            y = norm(x, p[b + "attn_norm.weight"])
            if i in full:
                o, seen[i] = attention(b, y, positions)
            else:
                o = delta_net(b, y)
            x = x + o
            y = norm(x, p[b + "post_attention_norm.weight"])
            inside = F.silu(F.linear(y, p[b + "ffn_gate.weight"])) * F.linear(y, p[b + "ffn_up.weight"])
            x = x + F.linear(inside, p[b + "ffn_down.weight"])
        return F.linear(norm(x, p["output_norm.weight"]), p["output.weight"]), seen

    def autocast():
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False)

    rng = np.random.default_rng(args.seed)
    filler = tape(1 << (23 if device == "cuda" else 20), args.seed + 1)

    def drawn(rows: int, length: int, kinds=None, facts: int = QUESTIONS):
        found = texts(rows, length, filler, rng, kinds, facts)
        jumps = np.zeros((rows, length), np.int64)
        jumps[:, 0] = rng.integers(0, 1 << 14, rows)
        for row in jumps:
            row[rng.integers(1, length, rng.integers(0, 6))] += rng.integers(0, 4096)
        positions = torch.from_numpy((jumps + (np.arange(length) > 0)).cumsum(1)).to(device)
        return found, torch.from_numpy(found["ids"]).to(device), positions

    trained = {name: x for name, x in p.items() if x.requires_grad}
    matrices = [
        x for name, x in trained.items() if x.ndim > 1 and "conv1d" not in name and "token_embd" not in name
    ]
    others = [x for x in trained.values() if not any(x is m for m in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    most = args.lr or sizes.lr
    rate = torch.tensor(most, device=device)
    is_cuda = device == "cuda"
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=is_cuda, capturable=is_cuda)

    def advance(ids, positions, answer):
        """A step; the mean loss of answers and of the rest, and the share of first values that are right."""
        with autocast():
            logits, _ = model(ids, positions)
        right = logits[:, :-1].argmax(-1) == ids[:, 1:]
        first = answer[:, 1:] & ~answer[:, :-1]
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        answer = answer[:, 1:].flatten().float()
        of_answers = (loss * answer).sum() / answer.sum()
        of_others = (loss * (1 - answer)).sum() / (1 - answer).sum()
        optimiser.zero_grad(set_to_none=True)
        (of_answers + 0.05 * of_others).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimiser.step()
        return of_answers.detach(), of_others.detach(), (right & first).sum() / first.sum()

    def captured(batch):
        """`advance` as a CUDA graph of this shape: a step is thousands of small kernels, which Python launches too slowly."""
        fixed = [x.clone() for x in batch]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                advance(*fixed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = advance(*fixed)

        def replay(*batch):
            for to, x in zip(fixed, batch, strict=True):
                to.copy_(x)
            graph.replay()
            return losses

        return replay

    began, step, printed, shape, run = time.monotonic(), 0, 0.0, None, advance
    facts, firsts = 2 if args.begin is None else QUESTIONS, torch.zeros((), device=device)
    ends = np.cumsum([share for _, _, share in sizes.stages])
    while (done := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        stage = int(np.searchsorted(ends, done, side="right").clip(0, len(sizes.stages) - 1))
        rows, length, _ = sizes.stages[stage]
        rate.fill_(most * min(1.0, (step + 1) / 100) * min(1.0, max(0.01, (1 - done) / 0.3)))
        facts = QUESTIONS if stage else facts
        found, *batch = drawn(rows, length, np.zeros(rows, int) if facts < QUESTIONS else None, facts)
        batch.append(torch.from_numpy(found["answer"]).to(device))
        if is_cuda and (rows, length) != shape:
            shape, run = (rows, length), None  # frees the memory of the last graph first
            run = captured(batch)
        of_answers, of_others, of_firsts = run(*batch)
        step += 1
        firsts += of_firsts
        if step % LOOK == 0:
            facts += facts < QUESTIONS and firsts.item() > ENOUGH * LOOK
            firsts.zero_()
        if (now := time.monotonic()) - printed > 10:
            printed = now
            print(
                f"{100 * done:3.0f} %, step {step}, {rows} x {length}, {facts} facts: answers {of_answers.item():.3f}, "
                f"filler {of_others.item():.3f}; first values right {of_firsts.item():.2f}",
                flush=True,
            )
    np.savez(args.output, **{name: x.detach().float().cpu().numpy() for name, x in p.items()})
    print(f"{args.output}: written after {step} steps", flush=True)

    @torch.no_grad()
    def examine(length: int, rows: int) -> None:
        """Values that are right by kind, and facts among the best tenth of units of 64 tokens, by each attention block.

        Of first values 0.41 are right by elimination, as each fact is asked for once.
        """
        for kind, name in enumerate(KINDS):
            right, n, recall, asked = np.zeros(2, int), np.zeros(2, int), dict.fromkeys(full, 0), 0
            for _ in range(rows):
                found, ids, positions = drawn(1, length, np.array([kind]))
                with autocast():
                    logits, seen = model(ids, positions)
                hit = (logits[0, :-1].argmax(-1) == ids[0, 1:]).cpu().numpy()
                answer, before = found["answer"][0, 1:], found["answer"][0, :-1]
                for i, chosen in enumerate((answer & ~before, answer & before)):
                    right[i], n[i] = right[i] + hit[chosen].sum(), n[i] + chosen.sum()
                body = length - QUESTIONS * QUESTION
                for block, (q, k) in seen.items():
                    q = q[0].float()
                    k = k[0, :body].float().repeat_interleave(heads // kv_heads, 1)
                    for j in range(QUESTIONS):
                        at = body + j * QUESTION
                        mass = torch.einsum("tad,sad->tas", q[at : at + 2], k) / head**0.5
                        mass = mass.softmax(-1).mean((0, 1))
                        units = F.pad(mass, (0, -body % 64)).view(-1, 64).sum(1)
                        best = set(units.topk(math.ceil(len(units) / 10)).indices.tolist())
                        needed = [found["places"][0, s] // 64 for s in found["asked"][0, j] if s >= 0]
                        recall[block] += all(u in best for u in needed)
                asked += QUESTIONS
            shown = ", ".join(f"block {b} {r / asked:.2f}" for b, r in recall.items())
            values = " and ".join(f"{r / m:.3f}" for r, m in zip(right, n) if m)
            print(f"{length} tokens, {name}: values right {values}; recall at 0.1: {shown}", flush=True)

    for _, length, _ in sizes.stages:
        examine(length, args.examined)


def spelt() -> list[str]:
    """How each token is spelt: words with a space before, so that a lexical scorer sees words too."""
    names = [f" c{i}" for i in range(CONTROL)]
    marks = {KEY: " key", LINK: " link", ASK: " ask", HOP: " hop", COUNT: " count", DOT: " .\n"}
    for i, word in marks.items():
        names[i] = word
    # a line ends now and then in filler too
    names += [f" f{i:03}" + ("\n" if i % 32 == 0 else "") for i in range(FILLER)]
    for letter in "ksv":
        names += [f" {letter}{i:03}" for i in range(KEYS)]
    names += [f" x{i:03}" for i in range(VOCAB - len(names) - 3)]
    return [*names, "a", "b", "ab"]  # a vocabulary of this kind has a merge


def write_gguf(weights: Path, path: Path, sizes: Sizes, blocks: int) -> None:
    """The weights as a file; of fewer blocks, for a scorer that looks at an earlier one."""
    from gguf import GGUFWriter

    found = np.load(weights)
    writer = GGUFWriter(path, "qwen35")
    writer.add_name("Toy scorer")
    writer.add_block_count(blocks)
    writer.add_context_length(32768)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.ff)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head)
    writer.add_value_length(sizes.head)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(sizes.rot)
    for key, value in (("conv_kernel", KERNEL), ("state_size", sizes.state), ("group_count", sizes.k_heads)):
        writer.add_uint32(f"qwen35.ssm.{key}", value)
    writer.add_uint32("qwen35.ssm.time_step_rank", sizes.v_heads)
    writer.add_uint32("qwen35.ssm.inner_size", sizes.v_heads * sizes.state)
    writer.add_array("qwen35.attention.recurrent_layers", [i not in sizes.full for i in range(blocks)])
    # words are found whole
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(spelt())
    writer.add_token_types([4] * (VOCAB - 3) + [1] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name in found.files:
        block = int(name.split(".")[1]) if name.startswith("blk.") else 0
        if block < blocks:
            writer.add_tensor(name, np.ascontiguousarray(found[name], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="write weights here (.npz)")
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="the highest learning rate, instead of that of the sizes")
    parser.add_argument(
        "--examined", type=int, default=10, help="texts of each kind and length that are examined"
    )
    parser.add_argument("--begin", type=Path, help="go on from these weights (.npz)")
    parser.add_argument("--remember", action="store_true", help="train the decays of delta nets too")
    parser.add_argument("--gguf", type=Path, help="write a file of --weights instead of training")
    parser.add_argument("--weights", type=Path)
    parser.add_argument(
        "--blocks", type=int, help="blocks of that file, for a scorer that looks at an earlier one"
    )
    parser.add_argument("--sizes", choices=SIZES, default="gpu")
    args = parser.parse_args()
    if args.gguf:
        sizes = SIZES[args.sizes]
        write_gguf(args.weights, args.gguf, sizes, args.blocks or sizes.layers)
    else:
        train(args)


if __name__ == "__main__":
    main()
